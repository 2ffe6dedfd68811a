"""Cross-entropy whose reductions are fp32, from logits or from the hidden state and the head."""

from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)

from titan_lowprec.ops.cross_entropy.common import (
    Formed,
    HeadSpec,
    Impl,
    accumulation_dtype,
    check_labels,
    check_operands,
    splits,
)
from titan_lowprec.ops.cross_entropy.logits import PerRow, Sum, cross_entropy
from titan_lowprec.ops.cross_entropy.reference import form_reference, round_reference
from titan_lowprec.ops.cross_entropy.shards import VocabularyShard, check_shard
from titan_lowprec.shapes import Float, Float32, Int64, Tensor

__all__ = [
    "SAVE_OPS",
    "HeadSpec",
    "Impl",
    "VocabularyShard",
    "cross_entropy",
    "linear_cross_entropy",
]


def linear_cross_entropy(
    hidden_NE: Float[Tensor, "N E"],
    weight_VE: Float[Tensor, "V E"],
    labels_N: Int64[Tensor, " N"],
    *,
    ignore_index: int,
    chunk_rows: int,
    z_loss: float,
    softcap: float | None,
    token_weight_N: Float32[Tensor, " N"] | None,
    impl: Impl,
    shard: VocabularyShard | None = None,
) -> tuple[Sum, PerRow, PerRow]:
    """Sum the cross-entropy of ``hidden @ weight.T`` without keeping the logits.

    Gradients are formed in the forward pass, ``chunk_rows`` rows at a time; the backward pass
    multiplies them by the incoming gradient, the head's (of 16 bits) in place: one backward pass
    per forward pass. Only the sum is differentiable: weight rows through ``token_weight_N``, not
    through the per-token loss, which is returned detached.

    Args:
        hidden_NE: Output of the last norm.
        weight_VE: The head, of the same dtype; frozen if it does not require a gradient.
        labels_N: int64 in ``[0, V)``, or ``ignore_index``.
        ignore_index: Label of a row without a loss.
        chunk_rows: Rows whose logits exist at once.
        z_loss: Weight of ``lse ** 2`` in a row's loss.
        softcap: Logits become ``softcap * tanh(logits / softcap)``; ``None`` leaves them.
        token_weight_N: Factor of each row's loss, fp32, or ``None`` for 1; a constant.
        impl: ``"reference"`` runs anywhere; ``"triton"`` needs bf16 on a Hopper GPU.
        shard: Which rows of a head that is spread over processes ``weight_VE`` holds; every
            process passes the same rows, labels and options. ``None``: all rows.

    Returns:
        Loss sum (differentiable), loss per row with its weight (0 where ignored), natural-log
        LSE per row of the soft-capped logits. With a shard all three, and the gradient of
        ``hidden_NE``, are those of the whole head, in the same bits on every process.

    Raises:
        ValueError: An option, shape or dtype does not fit, or (on a CPU) a label is out of
            range. On a GPU that row's loss, the sum and the gradients become NaN.
        TypeError: Labels are not int64.

    Numerics:
        fp32 logits from exact products, fp32 LSE, loss and dW sum; each gradient is rounded
        once, after the incoming gradient has been multiplied in. Shards add up dX in fp32.

    Source:
        `reference.py` is the specification; README.md says what the kernels add to it.
    """
    spec = HeadSpec(ignore_index, chunk_rows, z_loss, softcap, impl)
    check_operands(hidden_NE, weight_VE, labels_N, token_weight_N)
    vocabulary = weight_VE.shape[0]
    if shard is not None:
        check_shard(weight_VE, shard)
        vocabulary = shard.vocabulary
    check_labels(labels_N, vocabulary=vocabulary, ignore_index=ignore_index)
    grad = torch.is_grad_enabled()
    loss_sum, per_token_N, lse_N, _, _, _ = torch.ops.titan_lowprec.linear_cross_entropy_forward(
        hidden_NE,
        weight_VE,
        labels_N,
        token_weight_N,
        spec.ignore_index,
        spec.chunk_rows,
        spec.z_loss,
        spec.softcap,
        spec.impl,
        None if shard is None else shard.encode(),
        grad and hidden_NE.requires_grad,
        grad and weight_VE.requires_grad,
        True,
    )
    return loss_sum, per_token_N.detach(), lse_N.detach()


_FORWARD_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor labels, Tensor? token_weight, SymInt ignore_index, "
    "SymInt chunk_rows, float z_loss, float? softcap, str impl, str? shard, bool need_hidden, "
    "bool need_weight, bool reuse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_ROUND_SCHEMA = (
    "(Tensor grad_weight_high, Tensor grad_weight_low, Tensor factor, ScalarType dtype, str impl) "
    "-> Tensor"
)


@torch.library.custom_op(
    "titan_lowprec::linear_cross_entropy_forward", mutates_args=(), schema=_FORWARD_SCHEMA
)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    ignore_index: int,
    chunk_rows: int,
    z_loss: float,
    softcap: float | None,
    impl: Impl,
    shard: str | None,
    need_hidden: bool,
    need_weight: bool,
    reuse: bool,
) -> tuple[Tensor, ...]:
    """``reuse``: nobody reads the last three results, so the backward pass may overwrite them."""
    spec = HeadSpec(ignore_index, chunk_rows, z_loss, softcap, impl)
    part = None if shard is None else VocabularyShard.decode(shard)
    vocabulary = weight.shape[0] if part is None else part.vocabulary
    check_labels(labels, vocabulary=vocabulary, ignore_index=ignore_index)
    form = form_reference
    if impl == "triton":
        from titan_lowprec.ops.cross_entropy.kernel import form_triton

        form = form_triton
    formed = form(
        hidden,
        weight,
        labels,
        token_weight,
        spec=spec,
        shard=part,
        need_hidden=need_hidden,
        need_weight=need_weight,
    )
    return formed.tensors()


@_forward.register_fake  # pyright: ignore[reportUnknownMemberType]
def _forward_fake(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    ignore_index: int,
    chunk_rows: int,
    z_loss: float,
    softcap: float | None,
    impl: Impl,
    shard: str | None,
    need_hidden: bool,
    need_weight: bool,
    reuse: bool,
) -> tuple[Tensor, ...]:
    (N, E), V = hidden.shape, weight.shape[0]
    rows, split = V if need_weight else 0, splits(weight.dtype)
    dtype = accumulation_dtype(hidden.dtype)
    return Formed(
        loss_sum=hidden.new_empty((), dtype=dtype),
        per_token_N=hidden.new_empty((N,), dtype=dtype),
        lse_N=hidden.new_empty((N,), dtype=dtype),
        grad_hidden_NE=hidden.new_empty((N if need_hidden else 0, E), dtype=dtype),
        grad_weight_high_VE=weight.new_empty((rows, E), dtype=torch.int16 if split else dtype),
        grad_weight_low_VE=weight.new_empty((rows if split else 0, E), dtype=torch.int16),
    ).tensors()


def _round_into(
    out: Tensor, high: Tensor, low: Tensor, factor: Tensor, dtype: torch.dtype, impl: Impl
) -> Tensor:
    """Round split fp32 values into ``out`` (which may be ``high``) and return it as ``dtype``."""
    if impl == "triton":
        from titan_lowprec.ops.cross_entropy.kernel import round_triton

        round_triton(out, high, low, factor, dtype)
    else:
        round_reference(out, high, low, factor, dtype)
    return out.view(dtype)


@torch.library.custom_op(
    "titan_lowprec::linear_cross_entropy_round", mutates_args=(), schema=_ROUND_SCHEMA
)
def _round(
    grad_weight_high: Tensor,
    grad_weight_low: Tensor,
    factor: Tensor,
    dtype: torch.dtype,
    impl: Impl,
) -> Tensor:
    out = torch.empty_like(grad_weight_high)
    return _round_into(out, grad_weight_high, grad_weight_low, factor, dtype, impl)


@_round.register_fake  # pyright: ignore[reportUnknownMemberType]
def _round_fake(
    grad_weight_high: Tensor,
    grad_weight_low: Tensor,
    factor: Tensor,
    dtype: torch.dtype,
    impl: Impl,
) -> Tensor:
    return torch.empty_like(grad_weight_high, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Zero gradients of the unused outputs would be as large as the head.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[3:])
    ctx.dtype, ctx.impl, ctx.reuse = inputs[0].dtype, inputs[8], inputs[12]


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * 11
    if grad_loss is None:
        return None, None, *nothing
    grad_hidden, grad_weight, low = ctx.saved_tensors
    grad_hidden = (grad_hidden * grad_loss).to(ctx.dtype)
    if not splits(ctx.dtype):
        grad_weight = grad_weight * grad_loss
    elif ctx.reuse and type(grad_weight) is Tensor and not _get_current_dispatch_mode_stack():
        # In place: a second copy of the head's gradient would be most of the op's memory.
        # Autograd sees the new version of a saved tensor, so a second backward pass raises.
        increment_version(grad_weight)
        grad_weight = _round_into(grad_weight, grad_weight, low, grad_loss, ctx.dtype, ctx.impl)
    else:  # traced, among others
        grad_weight = torch.ops.titan_lowprec.linear_cross_entropy_round(
            grad_weight, low, grad_loss, ctx.dtype, ctx.impl
        )
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    return grad_hidden if need_hidden else None, grad_weight if need_weight else None, *nothing


_forward.register_autograd(  # pyright: ignore[reportUnknownMemberType]
    _differentiate, setup_context=_setup
)

SAVE_OPS = frozenset({torch.ops.titan_lowprec.linear_cross_entropy_forward.default})
"""Ops whose results an activation-checkpoint policy should keep, never recompute."""
