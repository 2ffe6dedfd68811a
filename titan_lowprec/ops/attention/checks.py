"""What attention accepts: shapes, dtypes and head dimensions."""

import torch

from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Tensor


def check_head_dim(spec: AttentionSpec, head_dim: int) -> None:
    """Refuse head dimensions that the recipe cannot group or rotate."""
    if head_dim % 16 != 0 or head_dim <= 0:
        raise ValueError(
            f"attention: the head dimension must be a positive multiple of 16, got {head_dim}; "
            "pad q, k and v with zeros (and keep the scale of the true dimension in mind)"
        )
    if spec.rotate and head_dim & (head_dim - 1):
        raise ValueError(
            f"attention: rotate=True needs a power of two as head dimension, got {head_dim}; "
            "use dataclasses.replace(spec, rotate=False)"
        )


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec, impl: str
) -> None:
    """Refuse a packed call whose tensors do not fit together."""
    who = "attention_packed"
    if impl not in ("reference", "triton"):
        raise ValueError(
            f"{who}: impl must be 'reference' or 'triton', got {impl!r}; "
            "resolve_impl turns 'auto' into one of them"
        )
    if q.dtype not in (torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{who}: q, k and v must share bfloat16 or float32, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}; cast them where they are made"
        )
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{who}: q must be (N, H, D), k and v (N, J, D), got {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{who}: queries and keys must be the same tokens, got {q.shape[0]} and "
            f"{k.shape[0]}; cross-length attention is not supported"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{who}: H must be a multiple of J, got {q.shape[1]} query and {k.shape[1]} KV heads"
        )
    check_head_dim(spec, q.shape[2])
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{who}: cu_seqlens must be int32, got {cu_seqlens.dtype}; cast it")
    rows = 1 if cu_seqlens.ndim == 1 else cu_seqlens.shape[0]
    if cu_seqlens.ndim not in (1, 2) or rows == 0 or q.shape[0] % rows != 0:
        raise ValueError(
            f"{who}: cu_seqlens must be (M + 1,) or (R, M + 1) with R dividing the tokens, got "
            f"{tuple(cu_seqlens.shape)} for {q.shape[0]} tokens"
        )
