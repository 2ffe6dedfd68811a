"""The gradient norm, and clipping to it: in the gradients, or where the optimizer reads them."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

Tensor = torch.Tensor
EPSILON = 1e-6
"""What PyTorch adds to the norm that it divides by."""


@torch.no_grad()
def clip(
    model_parts: Sequence[nn.Module],
    max_norm: float,
    *,
    where: Literal["gradients", "optimizer"],
) -> tuple[Tensor, Tensor | None]:
    """The norm of all gradients, over all ranks, and what the optimizer is to divide them by.

    Args:
        model_parts: With their gradients.
        max_norm: Larger norms are scaled down to it.
        where: ``gradients`` scales them here; ``optimizer`` leaves them, for a fused optimizer
            that divides by ``grad_scale`` as it reads them: one pass over them less.

    Returns:
        The norm before clipping, a scalar; and the divisor, ``None`` where nothing is left to do.

    Numerics:
        ``optimizer`` divides where ``gradients`` multiplies by the rounded reciprocal: equal bits
        where nothing is clipped, otherwise equal up to two roundings of fp32.
    """
    parameters = [p for part in model_parts for p in part.parameters()]
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in parameters if p.grad is not None], foreach=True
    )
    if isinstance(norm, DTensor):
        norm = cast(Tensor, norm.full_tensor())
    if where == "optimizer":
        return norm, ((norm + EPSILON) / max_norm).clamp(min=1.0)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm, None
