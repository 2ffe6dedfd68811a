"""The attention kernels against the reference, float64 and themselves.

On a GPU everything runs. Under ``TRITON_INTERPRET=1`` (see ``test_kernel_interpreted.py``) the
small cases run on the CPU, with the interpreter's e4m3 cast replaced by one that rounds to nearest.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from titan_lowprec.ops.attention import kernel  # noqa: E402
from titan_lowprec.ops.attention.common import SAVED_SLOTS  # noqa: E402
from titan_lowprec.ops.attention.reference.backward import backward_reference  # noqa: E402
from titan_lowprec.ops.attention.reference.forward import forward_reference  # noqa: E402
from titan_lowprec.ops.attention.spec import AttentionSpec  # noqa: E402
from titan_lowprec.testing.accuracy import assert_as_accurate, attention_truth  # noqa: E402
from titan_lowprec.testing.cases import BOUNDARY_LENGTHS, PackedCase, packed_inputs  # noqa: E402
from titan_lowprec.testing.poison import poisoned_allocations  # noqa: E402

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
gpu_only = pytest.mark.skipif(INTERPRETED, reason="too slow, or bf16 products, interpreted")

change = dataclasses.replace


def spec(name, mask="causal", head_dim=128):
    """A specification the kernels take; no rotation where the head dimension forbids it."""
    base = AttentionSpec.mxfp8(mask=mask)
    mixed = AttentionSpec.nvfp4_mixed(mask=mask)
    specs = {
        "bf16": AttentionSpec.bf16(mask=mask),
        "bf16-residual": change(AttentionSpec.bf16(mask=mask), output_residual=True),
        "mxfp8": base,
        "mxfp8-wide": change(base, tile_k=128),
        "mxfp8-strict": change(base, scales="token"),
        "mxfp8-lagging": change(base, weight_exponent=4, max_lag=4),
        "mxfp8-residual": change(base, output_residual=True),
        "nvfp4_mixed": mixed,
        "nvfp4_mixed-wide": change(mixed, tile_k=128, output_residual=True),
        "nvfp4_mixed-strict": change(mixed, scales="token"),
        "nvfp4_mixed-lagging": change(mixed, weight_exponent=4, max_lag=4),
    }
    chosen = specs[name]
    return change(chosen, rotate=chosen.rotate and head_dim & (head_dim - 1) == 0)


ALL = ("bf16", "bf16-residual", "mxfp8", "mxfp8-wide", "mxfp8-strict", "mxfp8-lagging",
       "mxfp8-residual", "nvfp4_mixed", "nvfp4_mixed-wide", "nvfp4_mixed-strict",
       "nvfp4_mixed-lagging")  # fmt: skip
SMALL = PackedCase(rows=((70, 0, 33),), heads=2, kv_heads=1, head_dim=64, tail_tokens=5)


@pytest.fixture(autouse=True)
def nearest_casts_when_interpreted(monkeypatch):
    """Triton's interpreter truncates to e4m3; compiled kernels round to nearest, ties to even."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def nearest(x, input_type, output_type, rounding):
        if output_type == triton.language.float8e4nv and input_type == triton.language.float32:
            clipped = np.clip(x.view(np.float32), -448.0, 448.0)
            return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return convert(x, input_type, output_type, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)


def run(inputs, chosen, forward=None, backward=None):
    """Output, LSE and gradients by name; the kernels unless other functions are given."""
    q, k, v, grad = inputs.tensors()
    saved = (forward or kernel.forward_triton)(q, k, v, inputs.cu_seqlens_RM, chosen)
    found = (backward or kernel.backward_triton)(grad, saved, inputs.cu_seqlens_RM, chosen)
    results = {"out": saved.out_NHD, "dq": found.dq_NHD, "dk": found.dk_NJD, "dv": found.dv_NJD}
    return results, saved.lse2_NH


def reference(inputs, chosen):
    return run(inputs, chosen, forward_reference, backward_reference)


def inputs_of(case, seed=0, kind="gaussian", strength=1.0):
    return packed_inputs(case, kind=kind, strength=strength, seed=seed, device=DEVICE)


def assert_matches(name, inputs, chosen):
    """As accurate as the reference against float64, equal where nothing is to be computed."""
    truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask=chosen.mask)
    expected, lse2 = reference(inputs, chosen)
    with poisoned_allocations():
        actual, actual_lse2 = run(inputs, chosen)
    assert_as_accurate(name, actual, expected, truth.named())
    assert torch.equal(torch.isinf(actual_lse2), torch.isinf(lse2))
    finite = torch.isfinite(lse2)
    if chosen.recipe == "bf16":
        torch.testing.assert_close(actual_lse2[finite], lse2[finite], rtol=1e-6, atol=1e-5)
    else:  # the tensor core sums products of codes with about 14 bits
        natural = ({"lse": x[finite] * math.log(2.0)} for x in (actual_lse2, lse2))
        assert_as_accurate(name, *natural, {"lse": truth.lse_NH[finite]})
    tail = torch.isinf(lse2).all(1)
    for key, value in actual.items():
        assert not value[tail].any(), f"{key} of tokens past the last document"


@pytest.mark.parametrize(
    "name, mask",
    [
        ("mxfp8", "causal"),
        ("mxfp8-strict", "causal"),
        ("mxfp8-lagging", "full"),
        ("nvfp4_mixed", "causal"),
        ("nvfp4_mixed-strict", "full"),
    ],
)
def test_small_packed_rows_match_the_reference(name, mask):
    assert_matches(name, inputs_of(SMALL), spec(name, mask, SMALL.head_dim))


@gpu_only
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "case",
    [
        PackedCase(((300, 57, 1, 128, 0, 129), (600,)), 4, 2, 128, tail_tokens=13),
        PackedCase(((200, 31), (7, 220)), 8, 1, 64),
        PackedCase(((260,),), 3, 3, 96, dtype=torch.float32),
    ],
    ids=lambda case: case.id,
)
def test_packed_rows_match_the_reference(case, name, mask):
    assert_matches(name, inputs_of(case), spec(name, mask, case.head_dim))


@gpu_only
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_mixed"])
@pytest.mark.parametrize("kind, strength", [("peaked", 0.6), ("outlier_entries", 10.0),
                                            ("hot_channel", 30.0)])  # fmt: skip
def test_difficult_inputs_match_the_reference(kind, strength, name):
    case = PackedCase(((1024, 500),), 4, 2, 128)
    assert_matches(kind, inputs_of(case, kind=kind, strength=strength), spec(name))


@gpu_only
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_mixed"])
@pytest.mark.parametrize("length", BOUNDARY_LENGTHS)
def test_every_boundary_length_matches_the_reference(length, name):
    case = PackedCase(((3, length, 40, length),), 2, 1, 128)
    assert_matches(f"length {length}", inputs_of(case), spec(name))


@gpu_only
def test_a_thousand_documents_of_one_token_return_v_and_its_gradient():
    case = PackedCase(((1,) * 1000,), 2, 1, 128)
    inputs = inputs_of(case)
    actual, _ = run(inputs, spec("bf16"))
    v = inputs.v_NJD.expand(-1, 2, -1)
    torch.testing.assert_close(actual["out"], v, rtol=2**-8, atol=0)
    assert_matches("one token each", inputs, spec("mxfp8"))


@gpu_only
def test_sums_over_65536_keys_stay_as_accurate_as_the_reference_over_short_ones():
    case = PackedCase(((65536,),), 1, 1, 128)
    inputs = inputs_of(case)
    chosen = spec("mxfp8-wide")
    saved = kernel.forward_triton(*inputs.tensors()[:3], inputs.cu_seqlens_RM, chosen)
    rows = torch.arange(65536 - 64, 65536, device=DEVICE)
    q, k, v = (x[:, 0].double() for x in inputs.tensors()[:3])
    exact = ((q[rows] @ k.T * 128**-0.5).masked_fill(
        torch.arange(65536, device=DEVICE)[None] > rows[:, None], -torch.inf
    ).softmax(-1)) @ v  # fmt: skip
    error = (saved.out_NHD[rows, 0].double() - exact).norm() / exact.norm()
    assert error < 0.055, f"relative error {error:.3f} over long rows; 0.043 over short ones"


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-strict", "nvfp4_mixed"])
def test_either_backward_takes_what_either_forward_saved(name):
    chosen = spec(name, head_dim=64)
    inputs = inputs_of(SMALL)
    expected, _ = reference(inputs, chosen)
    for forward, backward in [
        (forward_reference, kernel.backward_triton),
        (kernel.forward_triton, backward_reference),
    ]:
        actual, _ = run(inputs, chosen, forward, backward)
        for key, value in expected.items():
            error = (actual[key].double() - value.double()).norm() / value.double().norm()
            assert error < 0.02, f"{key}: {error:.2e}"


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_mixed"])
def test_operands_equal_the_reference_in_bits(recipe):
    inputs = inputs_of(SMALL)
    q, k, v, _ = inputs.tensors()
    q[3, 0, 0] = torch.inf
    v[90, 0, 1] = torch.nan
    for scales in ("token_block", "token"):
        chosen = change(spec(recipe, head_dim=64), scales=scales)
        actual = kernel.forward_triton(q, k, v, inputs.cu_seqlens_RM, chosen)
        expected = forward_reference(q, k, v, inputs.cu_seqlens_RM, chosen)
        for slot in SAVED_SLOTS[3:]:
            a, b = (getattr(x, slot).view(torch.uint8) for x in (actual, expected))
            live = slice(0, 103)  # 4-bit codes of the tail: zeros here, its values there
            assert torch.equal(a[live], b[live]), f"{slot} under {scales}"


@gpu_only
@pytest.mark.parametrize("operand", ["q_NHD", "k_NJD", "grad_out_NHD"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_mixed", "nvfp4_mixed-strict"])
def test_what_a_nan_reaches_is_what_it_reaches_in_the_reference(name, operand):
    """Of NVFP4 operands, scores see the NaN of a token, products of gradients that of its block.

    The interpreter takes the NaN code of e4m3 for 480.
    """
    inputs = inputs_of(SMALL)
    getattr(inputs, operand)[40, 0, 2] = torch.nan
    chosen = spec(name, head_dim=SMALL.head_dim)
    actual, expected = run(inputs, chosen), reference(inputs, chosen)
    assert torch.equal(torch.isnan(actual[1]), torch.isnan(expected[1]))
    for key in actual[0]:
        assert torch.equal(torch.isnan(actual[0][key]), torch.isnan(expected[0][key])), key


def replaced(inputs, start, value):
    """The inputs with every token from ``start`` on set to a value."""
    tensors = [x.clone() for x in inputs.tensors()]
    for x in tensors:
        x[start:] = value
    return dataclasses.replace(
        inputs, **dict(zip(("q_NHD", "k_NJD", "v_NJD", "grad_out_NHD"), tensors, strict=True))
    )


@gpu_only
@pytest.mark.parametrize(
    "name", ["bf16", "mxfp8", "mxfp8-strict", "nvfp4_mixed", "nvfp4_mixed-strict"]
)
@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_another_document_leaves_every_bit_of_this_one(name, value):
    for length in range(128, 160):
        inputs = inputs_of(PackedCase(((length, 77),), 2, 1, 128), seed=length)
        before, before_lse = run(inputs, spec(name))
        after, after_lse = run(replaced(inputs, length, value), spec(name))
        assert torch.equal(before_lse[:length], after_lse[:length])
        for key in before:
            assert torch.equal(before[key][:length], after[key][:length]), f"{key}, {length}"


@gpu_only
@pytest.mark.parametrize("name", ["mxfp8-strict", "nvfp4_mixed-strict"])
@pytest.mark.parametrize("value", [1e6, 2.0**-16, float("nan")])
def test_strict_rows_do_not_depend_on_later_tokens(value, name):
    inputs = inputs_of(PackedCase(((300,),), 2, 1, 128))
    before, before_lse = run(inputs, spec(name))
    for start in (1, 31, 32, 100, 177, 255, 299):
        late = replaced(inputs, start, value)
        late = dataclasses.replace(late, grad_out_NHD=inputs.grad_out_NHD)
        after, after_lse = run(late, spec(name))
        assert torch.equal(before_lse[:start], after_lse[:start])
        for key in ("out", "dq"):
            assert torch.equal(before[key][:start], after[key][:start]), f"{key} before {start}"


@gpu_only
@pytest.mark.parametrize(
    "name", ["bf16", "mxfp8", "mxfp8-strict", "nvfp4_mixed", "nvfp4_mixed-strict"]
)
def test_a_document_has_the_same_bits_alone_and_anywhere_in_a_row(name):
    document = inputs_of(PackedCase(((201,),), 2, 1, 128))
    alone, _ = run(document, spec(name))
    for shift in (0, 1, 31, 64, 130):
        row = inputs_of(PackedCase(((shift, 201, 90),), 2, 1, 128), seed=1)
        here = slice(shift, shift + 201)
        for ours, its in zip(row.tensors(), document.tensors(), strict=True):
            ours[here] = its
        packed, _ = run(row, spec(name))
        for key in alone:
            assert torch.equal(packed[key][here], alone[key]), f"{key} at {shift}"


@gpu_only
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4_mixed"])
def test_a_second_run_gives_the_same_bits(name):
    inputs = inputs_of(PackedCase(((700, 324),), 4, 2, 128))
    first, second = (run(inputs, spec(name))[0] for _ in range(2))
    for key in first:
        assert torch.equal(first[key], second[key]), key


@gpu_only
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_mixed"])
def test_a_captured_graph_follows_the_documents_of_its_input(name):
    case = PackedCase(((400, 112),), 2, 1, 128)
    inputs = inputs_of(case)
    chosen = spec(name)
    q, k, v, _ = inputs.tensors()
    kernel.forward_triton(q, k, v, inputs.cu_seqlens_RM, chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.forward_triton(q, k, v, inputs.cu_seqlens_RM, chosen)
    inputs.cu_seqlens_RM.copy_(torch.tensor([[0, 33, 300]], dtype=torch.int32))
    graph.replay()
    eager = kernel.forward_triton(q, k, v, inputs.cu_seqlens_RM, chosen)
    assert torch.equal(captured.out_NHD, eager.out_NHD)


def test_unsupported_choices_are_refused_with_a_reason():
    base = spec("mxfp8")
    for changed, word in [
        (change(base, centring=True), "centring"),
        (change(base, delta_gradient="unquantised_fault"), "delta_gradient"),
        (change(base, gradient_groups="tile"), "gradient_groups"),
        (change(base, tile_k=96), "tile"),
        (AttentionSpec.nvfp4_full(mask="causal"), "recipe"),
        (change(AttentionSpec.nvfp4_mixed(mask="causal"), dq_accum="fp16_boost"), "dq_accum"),
    ]:
        device = torch.device(DEVICE)
        reason = kernel.unsupported_reason(changed, head_dim=128, device=device)
        assert reason is not None and word in reason
    assert "head dimension" in kernel.unsupported_reason(
        base, head_dim=80, device=torch.device(DEVICE)
    )
