"""What AttentionSpec accepts, refuses and writes down."""

import contextlib
import dataclasses
import re

import jaxtyping
import pytest
import torch

from titan_lowprec.ops.attention.api import attention, attention_packed, resolve_impl
from titan_lowprec.ops.attention.spec import AttentionSpec

CONSTRUCTORS = (
    AttentionSpec.fp32,
    AttentionSpec.bf16,
    AttentionSpec.mxfp8,
    AttentionSpec.nvfp4_mixed,
    AttentionSpec.nvfp4_full,
)


@contextlib.contextmanager
def refused(message):
    """An error that says ``message``; under run-time shape checks theirs may come first."""
    with pytest.raises((ValueError, TypeError)) as caught:
        yield
    if not isinstance(caught.value, jaxtyping.TypeCheckError):
        assert re.search(message, str(caught.value))


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_encode_and_decode_give_back_an_equal_hashable_spec(constructor, mask):
    spec = dataclasses.replace(constructor(mask=mask), output_residual=True, tile_q=96)
    assert AttentionSpec.decode(spec.encode()) == spec
    assert hash(AttentionSpec.decode(spec.encode())) == hash(spec)
    assert spec.encode() != constructor(mask=mask).encode()


@pytest.mark.parametrize(("c", "tau"), [(8, 0), (4, 4), (0, 8), (7, 1)])
def test_weights_up_to_256_are_accepted(c, tau):
    AttentionSpec.mxfp8(mask="causal")
    dataclasses.replace(AttentionSpec.mxfp8(mask="causal"), weight_exponent=c, max_lag=tau)


@pytest.mark.parametrize(("c", "tau"), [(8, 1), (8, 2), (4, 5), (9, 0), (-1, 4), (4, -1)])
def test_weights_past_448_are_refused_when_the_spec_is_built(c, tau):
    with refused("weight_exponent \\+ max_lag"):
        dataclasses.replace(AttentionSpec.mxfp8(mask="causal"), weight_exponent=c, max_lag=tau)


@pytest.mark.parametrize(
    ("constructor", "changes", "message"),
    [
        (AttentionSpec.mxfp8, {"dv_exponent": "fixed"}, "folded exponent of G"),
        (AttentionSpec.mxfp8, {"row_sum": "rounded"}, "small V"),
        (AttentionSpec.mxfp8, {"fold": "block_scaled"}, "one set of dS codes"),
        (AttentionSpec.bf16, {"rotate": True}, "quantises nothing"),
        (AttentionSpec.bf16, {"scales": "token_block"}, "quantises nothing"),
        (AttentionSpec.nvfp4_full, {"dq_accum": "fp16_boost"}, "own 4-bit scale rules"),
        (AttentionSpec.bf16, {"delta_gradient": "unquantised_fault"}, "quantises nothing"),
        (
            AttentionSpec.mxfp8,
            {"delta_gradient": "unquantised_fault", "centring": True},
            "no G is left",
        ),
        (AttentionSpec.mxfp8, {"delta_gradient": "unquantised"}, "delta_gradient must be one of"),
        (AttentionSpec.mxfp8, {"recipe": "fp8"}, "recipe must be one of"),
        (AttentionSpec.mxfp8, {"mask": "sliding"}, "mask must be one of"),
        (AttentionSpec.mxfp8, {"tile_q": 48}, "multiple of 32"),
        (AttentionSpec.mxfp8, {"tile_k": 0}, "multiple of 32"),
    ],
)
def test_contradictory_choices_are_refused(constructor, changes, message):
    with refused(message):
        dataclasses.replace(constructor(mask="causal"), **changes)


def test_decode_refuses_a_missing_field():
    with refused("fields must be"):
        AttentionSpec.decode("recipe=bf16;mask=causal")


def _inputs(tokens, heads=2, head_dim=32, dtype=torch.float32):
    return torch.randn(tokens, heads, head_dim, dtype=dtype)


def test_cross_length_attention_is_refused_with_the_reason():
    spec = AttentionSpec.bf16(mask="full")
    q, k = torch.randn(1, 2, 4, 32), torch.randn(1, 2, 6, 32)
    with refused("cross-length attention"):
        attention(q, k, k, spec=spec, impl="reference")
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with refused("cross-length attention"):
        attention_packed(_inputs(4), _inputs(6), _inputs(6), offsets, spec=spec, impl="reference")


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 4], "start"),
        ([0, 3, 2, 4], "decreas"),
        ([0, 5], "4"),
    ],
)
def test_the_reference_refuses_bad_offsets(offsets, message):
    x = _inputs(4)
    with refused(message):
        attention_packed(
            x,
            x,
            x,
            torch.tensor(offsets, dtype=torch.int32),
            spec=AttentionSpec.bf16(mask="causal"),
            impl="reference",
        )


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    spec = AttentionSpec.mxfp8(mask="causal")
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    x = _inputs(4)

    def call(q, k, v, cu, spec=spec, impl="reference"):
        return attention_packed(q, k, v, cu, spec=spec, impl=impl)

    with refused("multiple of J"):
        call(_inputs(4, heads=3), x, x, offsets)
    with refused("share bfloat16 or float32"):
        call(x, x, x.bfloat16(), offsets)
    with refused("share bfloat16 or float32"):
        call(x.half(), x.half(), x.half(), offsets)
    with refused("cu_seqlens must be int32"):
        call(x, x, x, offsets.long())
    with refused("multiple of 16"):
        y = _inputs(4, head_dim=24)
        call(y, y, y, offsets)
    with refused("power of two"):
        y = _inputs(4, head_dim=96)
        call(y, y, y, offsets)
    with refused("R dividing the tokens"):
        call(x, x, x, offsets.expand(3, 2))
    with refused("resolve_impl"):
        call(x, x, x, offsets, impl="auto")


def test_auto_takes_the_reference_on_a_cpu_and_triton_says_why_not():
    spec, cpu = AttentionSpec.mxfp8(mask="causal"), torch.device("cpu")
    assert resolve_impl("auto", device=cpu, spec=spec, head_dim=64) == "reference"
    assert resolve_impl("reference", device=cpu, spec=spec, head_dim=64) == "reference"
    with refused("CUDA device"):
        resolve_impl("triton", device=cpu, spec=spec, head_dim=64)
    with refused("power of two"):
        resolve_impl("auto", device=cpu, spec=spec, head_dim=96)
