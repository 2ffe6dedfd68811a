"""The reference against float64, PyTorch's SDPA and its own parts."""

import dataclasses

import pytest
import torch

from titan_lowprec.diagnostics.attention_stats import gradient_statistics
from titan_lowprec.formats.codec import decode_e4m3fn, encode_e4m3fn
from titan_lowprec.formats.token_blocks import row_metadata
from titan_lowprec.ops.attention.api import AttentionSpec, attention, attention_packed
from titan_lowprec.ops.attention.reference.casts import round_e4m3fn, round_groups
from titan_lowprec.ops.attention.reference.forward import forward_reference
from titan_lowprec.ops.quantize.api import dequantize_tiles, quantize_tiles
from titan_lowprec.testing.accuracy import attention_truth, cosine, relative_l2
from titan_lowprec.testing.attention_specs import CAUSAL, named_specs
from titan_lowprec.testing.cases import SMALL_CASES, PackedCase, packed_inputs


def run(inputs, spec):
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs.tensors()[:3])
    result = attention_packed(q, k, v, inputs.cu_seqlens_RM, spec=spec, impl="reference")
    dq, dk, dv = torch.autograd.grad(result.out_NHD, (q, k, v), inputs.grad_out_NHD)
    return {"out": result.out_NHD.detach(), "dq": dq, "dk": dk, "dv": dv}, result.lse_NH


def gaussian(case):
    return packed_inputs(case, kind="gaussian", strength=1.0, seed=1, device="cpu")


# Largest relative L2 error of output and gradients over the small cases, and largest error of the
# LSE with bf16 inputs, each with a tenth of slack. Measured: bf16 0.0030, 0.0041, 7e-7; mxfp8
# 0.052, 0.068, 0.14; nvfp4_mixed 0.151, 0.151, 0.31; nvfp4_full 0.202, 0.297, 0.31.
BOUNDS = {
    "fp32": (2e-6, 2e-6, 2e-6),
    "bf16": (0.0034, 0.0045, 2e-6),
    "mxfp8": (0.057, 0.075, 0.16),
    "nvfp4_mixed": (0.167, 0.167, 0.35),
    "nvfp4_full": (0.223, 0.327, 0.35),
}


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("name", BOUNDS)
def test_output_lse_and_gradients_are_near_float64(name, mask, case):
    spec = named_specs(mask)[name]
    inputs = gaussian(case)
    truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask=mask)
    actual, lse = run(inputs, spec)
    forward_bound, gradient_bound, lse_bound = BOUNDS[name]
    for key, exact in truth.named().items():
        bound = forward_bound if key == "out" else gradient_bound
        assert actual[key].dtype == case.dtype
        if name == "fp32" and case.dtype == torch.bfloat16:
            bound = 0.0025  # the results themselves are rounded
        # A single token has gradients 0 in q and k: its errors are measured against G.
        size = exact.norm() if exact.norm() > 0 else inputs.grad_out_NHD.double().norm()
        assert (actual[key].double() - exact).norm() <= bound * size, key
    in_document = torch.isfinite(truth.lse_NH)
    assert torch.equal(torch.isfinite(lse), in_document)
    if name == "bf16" and case.dtype == torch.float32:
        lse_bound = 0.02  # the inputs themselves are rounded
    assert (lse - truth.lse_NH)[in_document].abs().max() <= lse_bound


@pytest.mark.parametrize("name", CAUSAL)
def test_every_option_stays_near_float64(name):
    case = PackedCase(rows=((1, 70, 129),), heads=4, kv_heads=2, head_dim=64, tail_tokens=3)
    inputs = gaussian(case)
    truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask="causal")
    actual, _ = run(inputs, CAUSAL[name])
    forward_bound, gradient_bound, _ = BOUNDS[CAUSAL[name].recipe]
    for key, exact in truth.named().items():
        bound = forward_bound if key == "out" else gradient_bound
        if name == "fp32":
            bound = 0.0025  # the results themselves are rounded to bf16
        assert relative_l2(actual[key], exact) <= bound, key
        assert (actual[key][-3:] == 0).all()


def test_bf16_agrees_with_sdpa_within_one_bf16_rounding():
    q, k, v = (torch.randn(2, h, 70, 64).bfloat16() for h in (4, 2, 2))
    ours = attention(q, k, v, spec=AttentionSpec.bf16(mask="causal"), impl="reference")
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    assert ours.shape == theirs.shape and ours.dtype == torch.bfloat16
    assert relative_l2(ours, theirs) < 3e-3


def test_dense_attention_is_the_packed_one_bit_for_bit():
    spec = AttentionSpec.mxfp8(mask="causal")
    q, k, v = (torch.randn(2, h, 70, 32) for h in (4, 2, 2))
    dense = attention(q, k, v, spec=spec, impl="reference")
    q, k, v = (x.transpose(1, 2).reshape(140, -1, 32) for x in (q, k, v))
    offsets = torch.tensor([0, 70, 140], dtype=torch.int32)
    packed = attention_packed(q, k, v, offsets, spec=spec, impl="reference").out_NHD
    assert torch.equal(dense.transpose(1, 2).reshape(140, 4, 32), packed)


def test_non_contiguous_inputs_give_the_same_bits():
    spec = AttentionSpec.mxfp8(mask="causal")
    offsets = torch.tensor([0, 50], dtype=torch.int32)
    q, k, v = (torch.randn(2, 50, 32).transpose(0, 1) for _ in range(3))
    strided = attention_packed(q, k, v, offsets, spec=spec, impl="reference").out_NHD
    copied = attention_packed(
        *(x.contiguous() for x in (q, k, v)), offsets, spec=spec, impl="reference"
    ).out_NHD
    assert torch.equal(strided, copied)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4_full"])
def test_rows_without_documents_give_zeros(name):
    x = torch.randn(6, 2, 32, requires_grad=True)
    offsets = torch.tensor([[0, 0, 0]], dtype=torch.int32)
    result = attention_packed(x, x, x, offsets, spec=CAUSAL[name], impl="reference")
    result.out_NHD.sum().backward()
    assert (result.out_NHD == 0).all() and (result.lse_NH == torch.inf).all()
    assert x.grad is not None and (x.grad == 0).all()


def test_rounding_by_a_magic_number_equals_the_codec_for_every_bf16_value_and_random_fp32():
    bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    random = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int32).view(torch.float32)
    near = torch.randn(200_000) * 2.0 ** torch.randint(-12, 10, (200_000,))
    for x in (bf16.float(), random, near):
        x = x[~x.isnan()]
        assert torch.equal(round_e4m3fn(x), decode_e4m3fn(encode_e4m3fn(x)))
    assert round_e4m3fn(torch.tensor([torch.nan])).isnan().all()


def test_square_groups_equal_the_tile_quantiser():
    x = torch.randn(3, 64, 96) * 2.0 ** torch.randint(-40, 3, (3, 64, 96))
    tiles = dequantize_tiles(quantize_tiles(x, tile=32, scale_mode="rceil"))
    assert torch.equal(round_groups(x, rows=32, columns=32), tiles)


@pytest.mark.parametrize("columns", [1, 64])
def test_line_groups_follow_the_largest_element_of_their_line(columns):
    x = torch.full((32, 64), 2.0**-30)
    x[:, 0], x[0, :] = 1.0, 1.0
    rounded = round_groups(x, rows=32 if columns == 1 else 1, columns=columns)
    # 2**-30 under a maximum of 1 is below half the smallest subnormal, 2**-9 * 2**-8.
    expected = torch.zeros_like(x)
    expected[0, :] = expected[:, 0] = 1.0
    assert torch.equal(rounded, expected)


def test_a_heavy_key_with_zero_v_keeps_its_weight_in_the_row_sum():
    """A zero V token has exponent -127 when folded; its softmax weight must still count."""
    for name in ("mxfp8", "mxfp8-block_scaled", "mxfp8-strict", "nvfp4_full"):
        q = torch.ones(40, 1, 32)
        k = torch.zeros(40, 1, 32)
        k[0] = 0.6
        v = torch.ones(40, 1, 32)
        v[0] = 0.0
        offsets = torch.tensor([[0, 40]], dtype=torch.int32)
        saved = forward_reference(q, k, v, offsets, CAUSAL[name])
        truth = attention_truth(q, k, v, torch.ones_like(q), offsets, mask="causal")
        assert relative_l2(saved.out_NHD[1:], truth.out_NHD[1:]) < 0.08, name


def test_an_unattended_v_token_of_2_to_the_14_does_not_flush_its_row():
    """The fold's reference is the row's own; a tile's exponent alone gives an error of 0.41."""
    case = PackedCase(rows=((64,),), heads=1, kv_heads=1, head_dim=32, dtype=torch.float32)
    inputs = gaussian(case)
    q, k, v, g = (x.clone() for x in inputs.tensors())
    k[5], v[5] = 0.0, v[5] * 2.0**14
    q[..., 0], k[..., 0], k[5, :, 0] = 10.0, 0.0, -18.0 * 32**0.5 / 10.0
    spec = dataclasses.replace(CAUSAL["mxfp8"], rotate=False, scales="token")
    saved = forward_reference(q, k, v, inputs.cu_seqlens_RM, spec)
    truth = attention_truth(q, k, v, g, inputs.cu_seqlens_RM, mask="causal")
    rows = torch.arange(64) > 5
    assert relative_l2(saved.out_NHD[rows], truth.out_NHD[rows]) < 0.06


def test_the_output_residual_holds_what_bf16_drops():
    inputs = gaussian(SMALL_CASES[1])
    saved = forward_reference(*inputs.tensors()[:3], inputs.cu_seqlens_RM, CAUSAL["bf16-residual"])
    truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask="causal").out_NHD
    with_low = saved.out_NHD.double() + saved.out_low.double()
    assert saved.out_low.dtype == torch.bfloat16
    assert relative_l2(with_low, saved.out_NHD) > 1e-4
    assert relative_l2(with_low, truth) < relative_l2(saved.out_NHD, truth)


def test_saved_codes_are_one_byte_an_element_and_blocks_share_their_scale():
    inputs = gaussian(SMALL_CASES[1])
    saved = forward_reference(*inputs.tensors()[:3], inputs.cu_seqlens_RM, CAUSAL["mxfp8"])
    assert saved.q_codes.dtype == torch.float8_e4m3fn and saved.q_scale.dtype == torch.uint8
    block_N = row_metadata(inputs.cu_seqlens_RM, row_tokens=SMALL_CASES[1].row_tokens)
    for block in block_N.block_index_N.unique().tolist():
        lines = saved.k_scale[block_N.block_index_N == block]
        assert (lines == lines[0]).all()
    assert (saved.v_codes.float()[-7:] == 0).all() and (saved.v_scale[-7:] == 0).all()


def test_the_lse_does_not_depend_on_the_row_sum_option():
    inputs = gaussian(SMALL_CASES[0])
    spec = CAUSAL["mxfp8-paper"]
    other = dataclasses.replace(spec, row_sum="unrounded")
    a, b = (
        forward_reference(*inputs.tensors()[:3], inputs.cu_seqlens_RM, s) for s in (spec, other)
    )
    assert torch.equal(a.lse2_NH, b.lse2_NH) and not torch.equal(a.out_NHD, b.out_NHD)


def test_centring_makes_rows_of_ds_sum_to_zero_before_their_cast():
    inputs = gaussian(
        PackedCase(rows=((90,),), heads=2, kv_heads=2, head_dim=32, dtype=torch.float32)
    )
    for name in ("bf16", "mxfp8", "nvfp4_mixed"):
        residuals = [
            gradient_statistics(*inputs.tensors(), inputs.cu_seqlens_RM, spec=spec).row_sum_residual
            for spec in (
                dataclasses.replace(CAUSAL[name], centring=centring) for centring in (False, True)
            )
        ]
        assert residuals[1] < 1e-6 < 1e-4 < residuals[0], (name, residuals)


def test_fp16_boost_survives_gradients_that_plain_fp16_would_lose():
    inputs = gaussian(
        PackedCase(rows=((64,),), heads=2, kv_heads=1, head_dim=32, dtype=torch.float32)
    )
    for magnitude in (1e-9, 1e9):
        small = dataclasses.replace(inputs, grad_out_NHD=inputs.grad_out_NHD * magnitude)
        plain, _ = run(small, CAUSAL["mxfp8"])
        for name in ("mxfp8-boost", "mxfp8-strict"):
            boosted, _ = run(small, CAUSAL[name])
            assert cosine(boosted["dq"], plain["dq"]) > 0.9999
            assert boosted["dq"].norm() > 0.99 * plain["dq"].norm()
