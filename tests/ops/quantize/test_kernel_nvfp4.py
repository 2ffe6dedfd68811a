"""NVFP4 kernels equal the reference in bits: codes, scales and the values in bf16.

On a GPU everything runs; without one, two cases when Triton interprets (see
``tests/ops/attention/test_kernel_interpreted.py``).
"""

import pytest
import torch

triton = pytest.importorskip("triton")

from titan_lowprec.formats.catalogue import E2M1FN, NVFP4  # noqa: E402
from titan_lowprec.formats.codec import decode_e4m3fn, pack_e2m1fn  # noqa: E402
from titan_lowprec.formats.token_blocks import row_metadata  # noqa: E402
from titan_lowprec.ops.hadamard.api import hadamard  # noqa: E402
from titan_lowprec.ops.quantize import kernel  # noqa: E402
from titan_lowprec.ops.quantize.api import (  # noqa: E402
    Nvfp4,
    dequantize_nvfp4,
    quantize_nvfp4,
    quantize_token_blocks,
)
from titan_lowprec.testing.poison import poisoned_allocations  # noqa: E402

INTERPRETED = kernel.interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
compiled_only = pytest.mark.skipif(INTERPRETED, reason="too slow, interpreted")

BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantized(x_NHD, cu_seqlens, *, scales, rotate):
    (blocks,) = kernel.work_lists(cu_seqlens, total_tokens=x_NHD.shape[0], lists=[(32, "document")])
    with poisoned_allocations():
        return kernel.quantize_mixed_operand(x_NHD, blocks, scales=scales, rotate=rotate)


def one_document(tokens):
    return torch.tensor([[0, tokens]], dtype=torch.int32, device=DEVICE)


def assert_equals_reference(four, values):
    expected = quantize_nvfp4(values, group=NVFP4.group, outer="none")
    assert torch.equal(four.scale_NHG, expected.scale_MG.view(torch.uint8))
    assert torch.equal(four.packed_NHP, pack_e2m1fn(expected.codes_MK))
    widened = kernel.widen_nvfp4(four, torch.float32 if INTERPRETED else torch.bfloat16)
    assert torch.equal(widened.float().nan_to_num(7.5), dequantize_nvfp4(expected).nan_to_num(7.5))


@pytest.mark.parametrize("scales", ["token_block", "token"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim, rotate", [(64, True), (96, False), (128, True), (128, False)])
def test_both_codes_of_one_pass_equal_the_reference(head_dim, rotate, dtype, scales):
    if INTERPRETED and (head_dim, dtype, scales) != (64, torch.float32, "token_block"):
        pytest.skip("too slow, interpreted")
    cu_seqlens = torch.tensor([[0, 5, 40, 73, 100]], dtype=torch.int32, device=DEVICE)
    total, live = 110, slice(0, 100)
    x = torch.randn(total, 3, head_dim)
    x = x * torch.exp2(torch.randint(-30, 30, (total, 3, 1)).float())
    x[3, 0, 0], x[20, 1, 3], x[10:13] = torch.inf, torch.nan, 0.0
    x = x.to(dtype).to(DEVICE)
    actual = quantized(x, cu_seqlens, scales=scales, rotate=rotate)
    values = hadamard(x) if rotate else x
    four = kernel.Nvfp4Codes(actual.four.packed_NHP[live], actual.four.scale_NHG[live])
    assert_equals_reference(four, values[live])
    assert not actual.four.packed_NHP[100:].any()
    if not INTERPRETED:  # whose e4m3 casts truncate
        block_N = row_metadata(cu_seqlens, row_tokens=total).block_index_N
        eight = quantize_token_blocks(values, block_N, scales=scales)
        assert torch.equal(actual.blocks.scale_NH, eight.scale_NH)
        codes = actual.blocks.codes_NHD.view(torch.uint8)
        assert torch.equal(codes, eight.codes_NHD.view(torch.uint8))


def neighbours(x):
    """Values, the fp32 next above and the one below."""
    up, down = (torch.nextafter(x, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    return torch.stack((x, up, down))


def test_every_boundary_of_every_scale_rounds_as_a_division_does():
    """Ties, and the fp32 numbers beside them, of all codes under all e4m3 scales.

    Largest magnitudes are 6, 5.75 and 6.25 scales: codes saturate under the last.
    """
    scale = decode_e4m3fn(torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    ties = neighbours(scale[:, None] * torch.tensor(BOUNDARIES)).permute(1, 2, 0).flatten(1)
    ties = torch.nn.functional.pad(torch.cat((ties, -ties), 1), (0, 3)).reshape(126, 3, 15)
    largest = scale[:, None] * torch.tensor([6.0, 5.75, 6.25])
    groups = torch.cat((largest[..., None], ties), 2)
    x = torch.nn.functional.pad(groups.reshape(126, 1, 48), (0, 16)).to(DEVICE)
    actual = quantized(x, one_document(126), scales="token", rotate=False)
    assert_equals_reference(actual.four, x)


def test_scales_round_to_nearest_even_over_the_whole_range():
    scale = decode_e4m3fn(torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    amax = torch.cat((scale, (scale[1:] + scale[:-1]) / 2)) * E2M1FN.max_value
    edges = torch.tensor([1e-45, 1e-38, 2.0**-20, 2688.0, 2690.0, 1e6, 3e38])
    amax = torch.cat((neighbours(amax).flatten().clamp(min=0.0), edges))
    amax = torch.nn.functional.pad(amax, (0, -amax.numel() % 4))
    groups = torch.zeros(amax.numel(), NVFP4.group)
    groups[:, 3], groups[:, 6], groups[:, 15] = amax / 2, -amax, -amax / 3
    x = groups.reshape(-1, 1, 64).to(DEVICE)
    actual = quantized(x, one_document(x.shape[0]), scales="token", rotate=False)
    assert_equals_reference(actual.four, x)


def test_all_codes_under_all_scales_widen_exactly():
    codes = torch.arange(256).repeat(256, 1) % 16
    packed = pack_e2m1fn(codes.to(torch.uint8).reshape(256, 16, 16)).to(DEVICE)
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).reshape(256, 16, 1)
    scale = torch.where(scale < 128, scale, 127).to(DEVICE)  # scales are not negative
    four = kernel.Nvfp4Codes(packed, scale)
    widened = kernel.widen_nvfp4(four, torch.float32 if INTERPRETED else torch.bfloat16)
    whole = Nvfp4(
        codes_MK=codes.to(torch.uint8).reshape(256, 16, 16).to(DEVICE),
        scale_MG=scale.view(torch.float8_e4m3fn),
        outer_M=torch.full((256, 16), 127, dtype=torch.uint8, device=DEVICE),
        saturated=torch.zeros((), dtype=torch.int64, device=DEVICE),
    )
    expected = dequantize_nvfp4(whole)
    finite = scale[..., 0] < 127
    assert torch.equal(widened.float()[finite], expected[finite])
    assert torch.isnan(widened[~finite]).all() and torch.isnan(expected[~finite]).all()


@compiled_only
def test_no_token_and_no_document_are_quantised():
    x = torch.randn(40, 2, 64, device=DEVICE)
    none = torch.zeros((1, 2), dtype=torch.int32, device=DEVICE)
    assert not quantized(x, none, scales="token", rotate=True).four.packed_NHP.any()
    empty = quantized(x[:0], none, scales="token", rotate=True).four
    assert kernel.widen_nvfp4(empty, torch.bfloat16).shape == (0, 2, 64)
