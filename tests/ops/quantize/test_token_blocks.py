"""Token-block and per-token scales: a loop over documents, isolation, prefixes, bits."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from titan_lowprec.formats.token_blocks import max_blocks, row_metadata, token_metadata
from titan_lowprec.ops.quantize.api import (
    BlockScales,
    TokenBlocks,
    dequantize_token_blocks,
    quantize_token_blocks,
    scale_table,
)

SCALES: list[BlockScales] = ["token_block", "token"]


def blocks_of(cu: list[int], total: int, device: torch.device) -> torch.Tensor:
    offsets = torch.tensor(cu, dtype=torch.int32, device=device)
    return token_metadata(offsets, total_tokens=total).block_index_N


def bits_equal(a: TokenBlocks, b: TokenBlocks, rows: slice = slice(None)) -> bool:
    return torch.equal(
        a.codes_NHD[rows].view(torch.uint8), b.codes_NHD[rows].view(torch.uint8)
    ) and torch.equal(a.scale_NH[rows], b.scale_NH[rows])


def by_loop(x: np.ndarray, cu: list[int], scales: BlockScales) -> tuple[np.ndarray, np.ndarray]:
    """Blocks sliced one by one, scales found by trial in float64, ml_dtypes' rounding."""
    codes = np.zeros(x.shape, np.uint8)
    scale = np.zeros(x.shape[:2], np.uint8)
    size = 32 if scales == "token_block" else 1
    for start, end in itertools.pairwise(cu):
        for first in range(start, end, size):
            rows = slice(first, min(first + size, end))
            for h in range(x.shape[1]):
                block = x[rows, h].astype(np.float64)
                e = -127
                while np.abs(block).max() > 448.0 * 2.0**e:
                    e += 1
                scale[rows, h] = e + 127
                scaled = (block * 2.0**-e).astype(np.float32)
                codes[rows, h] = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scale


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("start", [0, 1, 17, 31])
def test_packed_documents_equal_a_loop_over_blocks(
    start: int, dtype: torch.dtype, scales: BlockScales, device: torch.device
) -> None:
    lengths = [start, 1, 31, 0, 32, 33, 127]
    cu = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    total = cu[-1] + 5
    x = (torch.randn(total, 2, 16) * torch.exp2(torch.randint(-40, 40, (total, 2, 1)))).to(dtype)
    actual = quantize_token_blocks(x.to(device), blocks_of(cu, total, device), scales=scales)
    codes, scale = by_loop(x.to(torch.float32).numpy(), cu, scales)
    np.testing.assert_array_equal(actual.codes_NHD.view(torch.uint8).cpu().numpy(), codes)
    np.testing.assert_array_equal(actual.scale_NH.cpu().numpy(), scale)
    exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exact = np.ldexp(exact, scale.astype(int)[..., None] - 127)
    np.testing.assert_array_equal(dequantize_token_blocks(actual).cpu().numpy(), exact)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("poison", [1e30, torch.inf, torch.nan, 2.0**-140], ids=str)
def test_no_document_changes_the_bits_of_another_at_any_alignment(
    scales: BlockScales, poison: float, device: torch.device
) -> None:
    for boundary in range(32, 64):
        blocks = blocks_of([0, boundary, 100], 104, device)
        x = torch.randn(104, 2, 8, device=device)
        clean = quantize_token_blocks(x, blocks, scales=scales)
        second = x.clone()
        second[boundary:] = poison
        assert bits_equal(
            clean, quantize_token_blocks(second, blocks, scales=scales), slice(0, boundary)
        )
        first = x.clone()
        first[:boundary] = poison
        assert bits_equal(
            clean, quantize_token_blocks(first, blocks, scales=scales), slice(boundary, None)
        )


@pytest.mark.parametrize("scales", SCALES)
def test_packed_equals_each_document_alone(scales: BlockScales, device: torch.device) -> None:
    cu = [0, 45, 46, 110, 141]
    x = torch.randn(141, 3, 16, device=device) * 100
    packed = quantize_token_blocks(x, blocks_of(cu, 141, device), scales=scales)
    for start, end in itertools.pairwise(cu):
        blocks = blocks_of([0, end - start], end - start, device)
        alone = quantize_token_blocks(x[start:end], blocks, scales=scales)
        assert torch.equal(alone.scale_NH, packed.scale_NH[start:end])
        assert torch.equal(
            alone.codes_NHD.view(torch.uint8), packed.codes_NHD[start:end].view(torch.uint8)
        )


@pytest.mark.parametrize("change", [1e6, 2.0**-15], ids=str)
def test_strict_scales_depend_on_the_token_alone(change: float, device: torch.device) -> None:
    blocks = blocks_of([0, 96], 96, device)
    x = torch.randn(96, 2, 16, device=device)
    clean = quantize_token_blocks(x, blocks, scales="token")
    for t in (1, 31, 32, 50, 95):
        changed = x.clone()
        changed[t:] *= change
        assert bits_equal(clean, quantize_token_blocks(changed, blocks, scales="token"), slice(t))


def test_block_scales_reach_back_to_the_start_of_the_block_only(device: torch.device) -> None:
    blocks = blocks_of([0, 96], 96, device)
    x = torch.randn(96, 2, 16, device=device)
    clean = quantize_token_blocks(x, blocks, scales="token_block")
    changed = x.clone()
    changed[50:] *= 1e6
    after = quantize_token_blocks(changed, blocks, scales="token_block")
    assert bits_equal(clean, after, slice(32))
    assert bool((clean.scale_NH[32:50] != after.scale_NH[32:50]).all())


@pytest.mark.parametrize("scales", SCALES)
def test_tail_tokens_are_zero_and_influence_nothing(
    scales: BlockScales, device: torch.device
) -> None:
    blocks = blocks_of([0, 40], 48, device)
    x = torch.randn(48, 1, 16, device=device)
    clean = quantize_token_blocks(x, blocks, scales=scales)
    for value in (torch.nan, -torch.inf, 1e38, -1.0):
        x[40:] = value
        after = quantize_token_blocks(x, blocks, scales=scales)
        assert bits_equal(clean, after)
    assert int(clean.scale_NH[40:].count_nonzero()) == 0
    assert int(clean.codes_NHD[40:].view(torch.uint8).count_nonzero()) == 0
    assert int(dequantize_token_blocks(clean)[40:].count_nonzero()) == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_bad_value_marks_its_block_and_head_and_no_other(
    value: float, device: torch.device
) -> None:
    blocks = blocks_of([0, 70], 70, device)
    x = torch.randn(70, 2, 16, device=device)
    x[40, 1, 3] = value
    for scales, marked in (("token_block", slice(32, 64)), ("token", slice(40, 41))):
        quantized = quantize_token_blocks(x, blocks, scales=scales)
        expected = torch.zeros(70, 2, dtype=torch.bool, device=device)
        expected[marked, 1] = True
        assert torch.equal(quantized.scale_NH == 255, expected)
        codes = quantized.codes_NHD.view(torch.uint8)
        assert int(codes[marked, 1].count_nonzero()) == 0
        assert not bool(((codes & 0x7F) == 0x7F).any())
        values = dequantize_token_blocks(quantized)
        assert torch.equal(values.isnan(), expected.unsqueeze(-1).expand_as(values))


def test_zero_blocks_have_byte_zero_and_the_maximum_never_saturates(device: torch.device) -> None:
    blocks = blocks_of([0, 96], 96, device)
    x = torch.zeros(96, 1, 16, device=device)
    x[32:64] = 500.0
    x[64:] = torch.nextafter(torch.tensor(448.0), torch.tensor(0.0)).to(device)
    quantized = quantize_token_blocks(x, blocks, scales="token_block")
    assert quantized.scale_NH[:, 0].unique_consecutive().tolist() == [0, 128, 127]
    values = dequantize_token_blocks(quantized)[:, 0, 0].unique_consecutive().tolist()
    assert values == [0.0, 512.0, 448.0]


def test_rows_of_a_batch_equal_each_row_alone(device: torch.device) -> None:
    cu = torch.tensor([[0, 20, 60], [0, 64, 64]], dtype=torch.int32, device=device)
    x = torch.randn(128, 2, 16, device=device)
    both = quantize_token_blocks(
        x, row_metadata(cu, row_tokens=64).block_index_N, scales="token_block"
    )
    for r in range(2):
        row = slice(64 * r, 64 * (r + 1))
        blocks = token_metadata(cu[r], total_tokens=64).block_index_N
        alone = quantize_token_blocks(x[row], blocks, scales="token_block")
        assert torch.equal(alone.scale_NH, both.scale_NH[row])


def test_the_scale_table_has_one_row_per_block(device: torch.device) -> None:
    cu = [0, 33, 33, 40]
    blocks = blocks_of(cu, 45, device)
    x = torch.randn(45, 2, 8, device=device)
    x[35] = torch.nan
    quantized = quantize_token_blocks(x, blocks, scales="token_block")
    capacity = max_blocks(total_tokens=45, max_documents=3)
    table = scale_table(quantized.scale_NH, blocks, capacity=capacity)
    assert table.shape == (capacity, 2)
    assert torch.equal(table[:3], quantized.scale_NH[[0, 32, 33]])
    assert table[2].tolist() == [255, 255]
    assert int(table[3:].count_nonzero()) == 0


def test_strided_and_empty_inputs(device: torch.device) -> None:
    blocks = blocks_of([0, 40], 40, device)
    x = torch.randn(2, 40, 16, device=device).transpose(0, 1)
    for scales in SCALES:
        strided = quantize_token_blocks(x, blocks, scales=scales)
        assert bits_equal(strided, quantize_token_blocks(x.contiguous(), blocks, scales=scales))
        empty = quantize_token_blocks(x[:0], blocks[:0], scales=scales)
        assert empty.codes_NHD.shape == (0, 2, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_quantising_on_a_device_waits_for_nothing_and_repeats_its_bits() -> None:
    device = torch.device("cuda")
    blocks = blocks_of(list(range(0, 4097, 241)), 4097, device)
    x = torch.randn(4097, 8, 128, device=device, dtype=torch.bfloat16)
    first = quantize_token_blocks(x, blocks, scales="token_block")
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = quantize_token_blocks(x, blocks, scales="token_block")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bits_equal(first, again)
    host = quantize_token_blocks(x.cpu(), blocks.cpu(), scales="token_block")
    assert torch.equal(host.scale_NH, first.scale_NH.cpu())
    assert torch.equal(host.codes_NHD.view(torch.uint8), first.codes_NHD.view(torch.uint8).cpu())


def test_bad_arguments_are_refused() -> None:
    x = torch.ones(4, 2, 8)
    blocks = torch.zeros(4, dtype=torch.int32)
    with pytest.raises((ValueError, TypeError), match="block"):
        quantize_token_blocks(x, blocks[:3], scales="token")
    with pytest.raises((ValueError, TypeError), match="'document'"):
        quantize_token_blocks(x, blocks, scales="document")
    with pytest.raises(TypeError, match="must be bfloat16 or float32, got"):
        quantize_token_blocks(x.to(torch.float64), blocks, scales="token")
    with pytest.raises((ValueError, TypeError), match="block"):
        scale_table(torch.zeros(3, 2, dtype=torch.uint8), blocks, capacity=4)
