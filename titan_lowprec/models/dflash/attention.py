"""Attention of drafted tokens to context and block, by a named implementation."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from titan_lowprec.models.dflash.bf16_attention import Bf16Attention
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.shapes import Bool, Float, Tensor

Impl = Literal[
    "reference",
    "reference_flex_bf16",
    "reference_flex_fp32",
    "flex_bf16",
    "flex_fp32_ieee",
    "flex_fp32_tf32",
]
"""``reference``: dense, any device, fp32 softmax and products, forward and backward.
``reference_flex_bf16``, ``reference_flex_fp32``: dense, any device; the arithmetic of ``flex_bf16``
and ``flex_fp32_ieee`` in a bf16 model. In an fp32 model, operands, output and their gradients are
rounded to bf16, so that the two differ in what is between.
``flex_bf16``: FlexAttention on operands as they are, which must be bf16.
``flex_fp32_ieee``, ``flex_fp32_tf32``: FlexAttention on q, k and v converted to fp32, with
products of that precision; the output is converted back."""


def check_impl(impl: str) -> None:
    """Refuse a name that is not an implementation."""
    if impl not in get_args(Impl):
        raise ValueError(f"draft_attention: impl must be one of {get_args(Impl)}, got {impl!r}")


def build_mask(mask: DraftMask, *, impl: Impl) -> Bool[Tensor, "B T K"] | BlockMask:
    """Build the form of a mask that an implementation reads, once for all layers."""
    check_impl(impl)
    return mask.dense() if impl.startswith("reference") else mask.block_sparse()


def draft_attention(
    q_BHTD: Float[Tensor, "B H T D"],
    k_BJKD: Float[Tensor, "B J K D"],
    v_BJKD: Float[Tensor, "B J K D"],
    *,
    mask: Bool[Tensor, "B T K"] | BlockMask,
    impl: Impl,
) -> Float[Tensor, "B H T D"]:
    """Attend to allowed keys; a query without any gives zeros and no gradients.

    Args:
        q_BHTD: Queries, scaled inside by ``D ** -0.5``.
        k_BJKD: Keys; ``H`` is a multiple of ``J``.
        v_BJKD: Values.
        mask: From `build_mask` with the same ``impl``; shared by all heads.
        impl: See `Impl`.

    Raises:
        TypeError: The mask is not of the implementation's form (a mask of numbers, say, which
            would be added to the scores), or ``flex_bf16`` gets another dtype.
        NotImplementedError: FlexAttention on a CPU is asked for gradients.

    Numerics:
        The scores' softmax is fp32 everywhere (fp64 for fp64 in the reference). ``flex_bf16``
        rounds probabilities, and the scores' gradients, to bf16 before their products; the fp32
        forms do not, and are left with the rounding of the output. `Bf16Attention` writes that
        rounding out, as if all keys were one tile. Autocast would undo their
        conversion, so it is off inside.
    """
    check_impl(impl)
    if q_BHTD.shape[1] % k_BJKD.shape[1] != 0:
        raise ValueError(
            f"draft_attention: H must be a multiple of J, got {q_BHTD.shape[1]} query and "
            f"{k_BJKD.shape[1]} KV heads"
        )
    with torch.autocast(q_BHTD.device.type, enabled=False):
        if impl == "reference":
            return _reference(q_BHTD, k_BJKD, v_BJKD, mask)
        if impl in ("reference_flex_bf16", "reference_flex_fp32"):
            q, k, v = (x.bfloat16() for x in (q_BHTD, k_BJKD, v_BJKD))
            attend = _reference if impl == "reference_flex_fp32" else _reference_bf16
            return attend(q, k, v, mask).to(q_BHTD.dtype)
        return _flex(q_BHTD, k_BJKD, v_BJKD, mask, impl)


def _dense_mask(mask: Bool[Tensor, "B T K"] | BlockMask) -> Bool[Tensor, "B T K"]:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"draft_attention: the reference needs a mask of bool, got {got}; "
            "use build_mask(..., impl='reference')"
        )
    return mask


def _reference_bf16(
    q: Tensor, k: Tensor, v: Tensor, mask: Bool[Tensor, "B T K"] | BlockMask
) -> Tensor:
    (B, H, T, D), J = q.shape, k.shape[1]
    out = Bf16Attention.apply(q.reshape(B, J, H // J, T, D), k, v, _dense_mask(mask))
    return out.reshape(B, H, T, D)


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Bool[Tensor, "B T K"] | BlockMask) -> Tensor:
    allowed = _dense_mask(mask)
    (B, H, T, D), J = q.shape, k.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).reshape(B, J, H // J, T, D)
    k, v = k.to(dtype), v.to(dtype)
    score = torch.einsum("bjgtd,bjkd->bjgtk", grouped, k) * D**-0.5
    score = score.masked_fill(~allowed[:, None, None], -torch.inf)
    # A row without keys has a finite shift, weights of zero and a divisor of one.
    shift = score.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
    weight = torch.exp(score - shift)
    total = weight.sum(-1, keepdim=True)
    weight = weight / total.masked_fill(total == 0, 1.0)
    out = torch.einsum("bjgtk,bjkd->bjgtd", weight, v)
    return out.reshape(B, H, T, D).to(q.dtype)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Bool[Tensor, "B T K"] | BlockMask, impl: Impl
) -> Tensor:
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"draft_attention: {impl} needs a BlockMask, got {type(mask).__name__}; "
            f"use build_mask(..., impl={impl!r})"
        )
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if q.device.type == "cpu" and gradients:
        raise NotImplementedError(
            f"draft_attention: {impl} has no backward pass on a CPU, because FlexAttention has "
            "none; use impl='reference', or torch.no_grad()"
        )
    if impl == "flex_bf16":
        if not q.dtype == k.dtype == v.dtype == torch.bfloat16:
            raise TypeError(
                f"draft_attention: flex_bf16 needs bf16, got {q.dtype}, {k.dtype}, {v.dtype}; "
                "the fp32 forms convert"
            )
        return _flex_attention(q.device.type)(q, k, v, block_mask=mask, enable_gqa=True)
    out = _flex_attention(q.device.type)(
        q.float(),
        k.float(),
        v.float(),
        block_mask=mask,
        enable_gqa=True,
        kernel_options=float32_options(impl),
    )
    return out.to(q.dtype)


def float32_options(impl: Impl) -> dict[str, Any]:
    """Name the precision of FlexAttention's fp32 products.

    Without it the kernels follow ``torch.get_float32_matmul_precision()``, a process-wide setting.
    """
    return {"FLOAT32_PRECISION": "'tf32'" if impl == "flex_fp32_tf32" else "'ieee'"}


@functools.cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    """FlexAttention, compiled where it has fused kernels; on a CPU its dense eager form."""
    if device_type == "cpu":
        return flex_attention
    return torch.compile(flex_attention, dynamic=False)
