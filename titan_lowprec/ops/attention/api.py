"""Attention inside the documents of packed rows: entry points, custom ops, autograd."""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from titan_lowprec.ops.attention.checks import check_head_dim, check_inputs
from titan_lowprec.ops.attention.common import SAVED_SLOTS, Saved, empty_slot, operand_dtype
from titan_lowprec.ops.attention.reference.backward import backward_reference
from titan_lowprec.ops.attention.reference.forward import forward_reference
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float, Float32, Int32, Tensor

__all__ = [
    "SAVE_OPS",
    "AttentionOutput",
    "AttentionSpec",
    "Impl",
    "attention",
    "attention_packed",
    "resolve_impl",
]

Impl = Literal["reference", "triton"]

_INPUT_SLOTS = ("q_codes", "k_codes", "v_codes")


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """Attention of packed tokens and the natural logarithm of each row's sum."""

    out_NHD: Float[Tensor, "N H D"]
    lse_NH: Float32[Tensor, "N H"]
    """Not differentiable; +inf past a row's last document."""


def attention_packed(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    cu_seqlens_RM: Int32[Tensor, "*R M1"],
    *,
    spec: AttentionSpec,
    impl: Impl,
) -> AttentionOutput:
    """Compute attention inside each document of packed rows.

    Args:
        q_NHD: Queries, bf16 or fp32; ``H`` is a multiple of ``J``.
        k_NJD: Keys, the same dtype.
        v_NJD: Values, the same dtype.
        cu_seqlens_RM: int32 document offsets: ``(M + 1,)`` for one row, or ``(R, M + 1)`` for
            rows of ``N / R`` tokens, each relative to its row. Empty documents, repeated totals
            and a tail past the last document are legal. Values are checked where the batch is
            made (``check_cu_seqlens``), and by the reference, which reads them.
        spec: Everything else that decides the result.
        impl: ``"reference"`` (PyTorch, any device) or ``"triton"``.

    Returns:
        The output in the inputs' dtype, differentiable in q, k and v, and the LSE. Tokens past a
        row's last document get output 0, LSE +inf and gradients 0.

    Raises:
        ValueError: Shapes, offsets or head dimension do not fit; queries and keys differ in
            length; the kernels do not support ``spec``.
        TypeError: A dtype does not fit.

    Numerics:
        ``ops/attention/README.md``. The backward uses the operands that the forward encoded.

    Source:
        arXiv:2611.03344; packed strict causality is this project's.
    """
    check_inputs(q_NHD, k_NJD, v_NJD, cu_seqlens_RM, spec, impl)
    offsets = cu_seqlens_RM if cu_seqlens_RM.ndim == 2 else cu_seqlens_RM[None]
    outputs = torch.ops.titan_lowprec.attention_forward(
        q_NHD, k_NJD, v_NJD, offsets, spec.encode(), impl
    )
    return AttentionOutput(out_NHD=outputs[0], lse_NH=outputs[1] * math.log(2.0))


def attention(
    q_BHTD: Float[Tensor, "B H T D"],
    k_BJSD: Float[Tensor, "B J S D"],
    v_BJSD: Float[Tensor, "B J S D"],
    *,
    spec: AttentionSpec,
    impl: Impl,
) -> Float[Tensor, "B H T D"]:
    """Compute dense attention, one document a row.

    Args:
        q_BHTD: Queries, head first.
        k_BJSD: Keys; ``S`` equals ``T``.
        v_BJSD: Values.
        spec: As in ``attention_packed``.
        impl: As in ``attention_packed``.

    Returns:
        The output, head first.

    Raises:
        ValueError: As in ``attention_packed``; also where ``T`` and ``S`` differ.

    Numerics:
        The packed path, with one document per row.

    Source:
        As ``attention_packed``.
    """
    B, _, T, _ = q_BHTD.shape
    if k_BJSD.shape[2] != T or k_BJSD.shape[0] != B:
        raise ValueError(
            "attention: queries and keys must have equal batch and length, got "
            f"q {tuple(q_BHTD.shape)} and k {tuple(k_BJSD.shape)}; cross-length attention (a "
            "decoding step, a prefix cache, cross attention) is not supported"
        )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BJSD, v_BJSD))
    offsets = torch.arange(2, dtype=torch.int32, device=q_BHTD.device) * T
    result = attention_packed(q, k, v, offsets.expand(B, 2), spec=spec, impl=impl)
    return result.out_NHD.reshape(B, T, *result.out_NHD.shape[1:]).transpose(1, 2)


def resolve_impl(
    requested: Literal["auto"] | Impl, *, device: torch.device, spec: AttentionSpec, head_dim: int
) -> Impl:
    """Turn a configuration's choice into an implementation, once, before training.

    Args:
        requested: ``"auto"`` takes the kernels where they support the call, else the reference.
        device: Where the call will run.
        spec: What it will compute.
        head_dim: Its head dimension.

    Raises:
        ValueError: ``"triton"`` was asked for and does not support the call; the reason is given.

    Numerics:
        None.

    Source:
        README.md, "Recipes"; the caller logs what it got.
    """
    check_head_dim(spec, head_dim)
    if requested not in ("auto", "reference", "triton"):
        raise ValueError(
            "resolve_impl: the implementation must be 'auto', 'reference' or 'triton', "
            f"got {requested!r}"
        )
    if requested == "reference":
        return "reference"
    reason = _kernel_refusal(device, spec, head_dim)
    if reason is None:
        return "triton"
    if requested == "triton":
        raise ValueError(
            f"resolve_impl: impl='triton' must support the call, but {reason}; "
            "use 'reference', or 'auto' to choose by support"
        )
    return "reference"


def _kernel_refusal(device: torch.device, spec: AttentionSpec, head_dim: int) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if device.type != "cuda":
        return f"the kernels need a CUDA device, got {device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from titan_lowprec.ops.attention import kernel

    return kernel.unsupported_reason(spec, head_dim=head_dim, device=device)


@torch.library.custom_op(
    "titan_lowprec::attention_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, str spec, str impl) -> ("
    + ", ".join(["Tensor"] * len(SAVED_SLOTS))
    + ")",
)
def _attention_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: str, impl: str
) -> tuple[Tensor, ...]:
    decoded = AttentionSpec.decode(spec)
    forward = forward_reference
    if impl == "triton":
        from titan_lowprec.ops.attention.kernel import forward_triton

        forward = forward_triton
    q, k, v, cu_seqlens = (x.contiguous() for x in (q, k, v, cu_seqlens))
    saved = forward(q, k, v, cu_seqlens, decoded)
    if not decoded.quantised:
        # These slots are the inputs, which an op may not return; autograd saves them itself.
        hidden = {name: empty_slot(torch.bfloat16, q.device) for name in _INPUT_SLOTS}
        named = zip(SAVED_SLOTS, saved.tensors(), strict=True)
        return tuple(hidden.get(name, _own_empty(tensor)) for name, tensor in named)
    return tuple(_own_empty(_as_bytes(tensor)) for tensor in saved.tensors())


def _own_empty(tensor: Tensor) -> Tensor:
    """Give an unused slot a storage of its own: the outputs of an op may not share one."""
    return torch.empty_like(tensor) if tensor.numel() == 0 else tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    """Codes leave an op as bytes: float8 tensors lack most of PyTorch's own operations."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@_attention_forward.register_fake  # pyright: ignore[reportUnknownMemberType]
def _attention_forward_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: str, impl: str
) -> tuple[Tensor, ...]:
    decoded = AttentionSpec.decode(spec)
    N, H, D = q.shape
    J = k.shape[1]
    none = {name: q.new_empty(0, dtype=torch.uint8) for name in SAVED_SLOTS[3:]}
    slots = none | {
        "out_NHD": q.new_empty((N, H, D)),
        "lse2_NH": q.new_empty((N, H), dtype=torch.float32),
        "out_low": q.new_empty(0, dtype=torch.bfloat16),
    }
    if decoded.output_residual and q.dtype == torch.bfloat16:
        slots["out_low"] = q.new_empty((N, H, D), dtype=torch.bfloat16)
    heads = {"q": H, "k": J, "v": J}
    codes = {"fp32": torch.bfloat16, "bf16": torch.bfloat16, "nvfp4_full": torch.float32}
    dtype = codes.get(decoded.recipe, torch.uint8)
    for name, count in heads.items():
        shape = (N, count, D) if decoded.quantised else (0,)
        slots[f"{name}_codes"] = q.new_empty(shape, dtype=dtype)
        if decoded.recipe in ("mxfp8", "nvfp4_mixed"):
            slots[f"{name}_scale"] = q.new_empty((N, count), dtype=torch.uint8)
        if decoded.recipe == "nvfp4_mixed" and name != "v":
            slots[f"{name}4_codes"] = q.new_empty((N, count, D // 2), dtype=torch.uint8)
            slots[f"{name}4_scale"] = q.new_empty((N, count, D // 16), dtype=torch.uint8)
    return tuple(slots[name] for name in SAVED_SLOTS)


@torch.library.custom_op(
    "titan_lowprec::attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, "
    + ", ".join(f"Tensor {name}" for name in SAVED_SLOTS)
    + ", Tensor cu_seqlens, str spec, str impl) -> (Tensor, Tensor, Tensor)",
)
def _attention_backward(grad_out: Tensor, *saved_and_options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, cu_seqlens, spec, impl = saved_and_options
    decoded = AttentionSpec.decode(spec)
    slots = dict(zip(SAVED_SLOTS, tensors, strict=True))
    if not decoded.quantised:
        dtype = operand_dtype(decoded)
        slots |= {name: slots[name].to(dtype).contiguous() for name in _INPUT_SLOTS}
    elif decoded.recipe != "nvfp4_full":
        slots |= {name: slots[name].view(torch.float8_e4m3fn) for name in _INPUT_SLOTS}
    backward = backward_reference
    if impl == "triton":
        from titan_lowprec.ops.attention.kernel import backward_triton

        backward = backward_triton
    saved = Saved(**slots)
    gradients = backward(grad_out.contiguous(), saved, cu_seqlens.contiguous(), decoded)
    return gradients.dq_NHD, gradients.dk_NJD, gradients.dv_NJD


@_attention_backward.register_fake  # pyright: ignore[reportUnknownMemberType]
def _attention_backward_fake(grad_out: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, k_codes = saved[0], saved[SAVED_SLOTS.index("k_codes")]
    keys = [torch.empty(k_codes.shape, dtype=out.dtype, device=out.device) for _ in range(2)]
    return torch.empty(out.shape, dtype=out.dtype, device=out.device), keys[0], keys[1]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens, spec, impl = inputs
    slots = dict(zip(SAVED_SLOTS, output, strict=True))
    if not AttentionSpec.decode(spec).quantised:
        slots |= {"q_codes": q, "k_codes": k, "v_codes": v}
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*slots.values(), cu_seqlens)
    ctx.options = (spec, impl)


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 6
    # One read: under selective checkpointing a second read of saved_tensors raises.
    tensors = ctx.saved_tensors
    gradients = torch.ops.titan_lowprec.attention_backward(grad_out, *tensors, *ctx.options)
    return (*gradients, None, None, None)


_attention_forward.register_autograd(  # pyright: ignore[reportUnknownMemberType]
    _differentiate, setup_context=_save_for_backward
)

SAVE_OPS = frozenset({torch.ops.titan_lowprec.attention_forward.default})
"""Ops whose outputs an activation-checkpoint policy should keep rather than recompute."""
