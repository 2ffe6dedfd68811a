"""The custom ops: opcheck, activation checkpointing, saved memory, compilation."""

import dataclasses
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_lowprec.ops.attention import api
from titan_lowprec.ops.attention.api import SAVE_OPS, AttentionSpec, attention, attention_packed

OFFSETS = torch.tensor([0, 40, 73, 120], dtype=torch.int32)
SPECS = {
    "bf16": AttentionSpec.bf16(mask="causal"),
    "mxfp8": AttentionSpec.mxfp8(mask="causal"),
    "nvfp4_mixed": AttentionSpec.nvfp4_mixed(mask="causal"),
    "nvfp4_full": AttentionSpec.nvfp4_full(mask="full"),
    "mxfp8-residual": dataclasses.replace(AttentionSpec.mxfp8(mask="causal"), output_residual=True),
}


def leaves(dtype=torch.bfloat16):
    return [torch.randn(128, h, 32, dtype=dtype, requires_grad=True) for h in (4, 2, 2)]


def call(spec, q, k, v, offsets=OFFSETS):
    return attention_packed(q, k, v, offsets, spec=spec, impl="reference").out_NHD


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SPECS)
def test_forward_op_passes_opcheck(name, dtype):
    q, k, v = leaves(dtype)
    torch.library.opcheck(
        torch.ops.titan_lowprec.attention_forward.default,
        (q, k, v, OFFSETS[None], SPECS[name].encode(), "reference"),
    )


@pytest.mark.compile
@pytest.mark.parametrize("name", SPECS)
def test_backward_op_passes_opcheck(name):
    q, k, v = (x.detach() for x in leaves())
    spec = SPECS[name].encode()
    saved = list(
        torch.ops.titan_lowprec.attention_forward(q, k, v, OFFSETS[None], spec, "reference")
    )
    if name == "bf16":
        saved[3], saved[5], saved[7] = q, k, v
    torch.library.opcheck(
        torch.ops.titan_lowprec.attention_backward.default,
        (torch.randn_like(q), *saved, OFFSETS[None], spec, "reference"),
    )


@pytest.mark.compile
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4_mixed"])
def test_compiled_without_graph_breaks_gives_the_same_bits(name):
    q, k, v = leaves()
    grad = torch.randn(128, 4, 32).bfloat16()
    eager = call(SPECS[name], q, k, v)
    compiled = torch.compile(partial(call, SPECS[name]), fullgraph=True)(q, k, v)
    assert torch.equal(eager, compiled)
    for a, b in zip(
        torch.autograd.grad(eager, (q, k, v), grad),
        torch.autograd.grad(compiled, (q, k, v), grad),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.compile
def test_other_documents_in_a_compiled_call_do_not_recompile():
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(call, SPECS["mxfp8"]), fullgraph=True, backend=count)
    q, k, v = leaves()
    for offsets in ([0, 10, 20, 128], [0, 128, 128, 128], [0, 1, 2, 3]):
        compiled(q, k, v, torch.tensor(offsets, dtype=torch.int32)).sum().backward()
    assert count.frame_count == 1


@pytest.mark.compile
def test_dense_attention_compiles_without_graph_breaks():
    x = torch.randn(2, 4, 48, 32, requires_grad=True)
    dense = partial(attention, spec=SPECS["mxfp8"], impl="reference")
    compiled = torch.compile(dense, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, x, x), dense(x, x, x))


def _save_attention(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("mode", "forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_checkpointing_keeps_bits_and_runs_the_forward_as_often_as_the_mode_says(
    name, mode, forwards
):
    q, k, v = leaves()
    grad = torch.randn(128, 4, 32).bfloat16()
    expected = torch.autograd.grad(call(SPECS[name], q, k, v), (q, k, v), grad)

    def layer(q, k, v):
        return call(SPECS[name], q * 1.0, k * 1.0, v * 1.0)

    contexts = partial(create_selective_checkpoint_contexts, _save_attention)
    options = {"context_fn": contexts} if mode == "selective" else {}
    with mock.patch.object(api, "forward_reference", wraps=api.forward_reference) as counted:
        if mode == "none":
            out = layer(q, k, v)
        else:
            out = checkpoint(layer, q, k, v, use_reentrant=False, **options)
        gradients = torch.autograd.grad(out, (q, k, v), grad)
    assert counted.call_count == forwards
    for a, b in zip(gradients, expected, strict=True):
        assert torch.equal(a, b)


def _saved_bytes(spec):
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    q, k, v = leaves()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(spec, q * 1.0, k * 1.0, v * 1.0)
    return sum(seen.values())


def test_saved_bytes_are_those_of_the_layout():
    N, H, J, D, offsets = 128, 4, 2, 32, OFFSETS.numel() * 4
    out_and_lse = N * H * D * 2 + N * H * 4
    inputs = N * (H + 2 * J) * D
    assert _saved_bytes(SPECS["bf16"]) == out_and_lse + 2 * inputs + offsets
    scales = N * (H + 2 * J)
    mxfp8 = out_and_lse + inputs + scales + offsets
    assert _saved_bytes(SPECS["mxfp8"]) == mxfp8
    assert _saved_bytes(SPECS["mxfp8-residual"]) == mxfp8 + N * H * D * 2
    four_bits = N * (H + J) * (D // 2 + D // 16)
    assert _saved_bytes(SPECS["nvfp4_mixed"]) == mxfp8 + four_bits


def test_the_backward_uses_the_forwards_codes_not_the_inputs():
    """Overwriting q, k and v after the forward changes nothing."""
    q, k, v = leaves()
    grad = torch.randn(128, 4, 32).bfloat16()
    expected = torch.autograd.grad(call(SPECS["mxfp8"], q, k, v), (q, k, v), grad)
    out = call(SPECS["mxfp8"], q, k, v)
    for x in (q, k, v):
        x.data.fill_(torch.nan)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), expected, strict=True):
        assert torch.equal(a, b)


def test_the_lse_is_not_differentiable():
    q, k, v = leaves()
    result = attention_packed(q, k, v, OFFSETS, spec=SPECS["mxfp8"], impl="reference")
    assert not result.lse_NH.requires_grad and result.out_NHD.requires_grad
