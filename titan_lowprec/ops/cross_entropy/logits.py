"""Cross-entropy of logits that exist: plain PyTorch, differentiated and compiled as it stands."""

import torch

from titan_lowprec.ops.cross_entropy.common import (
    accumulation_dtype,
    check_labels,
    check_options,
    label_poison,
)
from titan_lowprec.shapes import Float, Float32, Float64, Int64, Tensor

Sum = Float32[Tensor, ""] | Float64[Tensor, ""]
PerRow = Float32[Tensor, " N"] | Float64[Tensor, " N"]


def cross_entropy(
    logits_NV: Float[Tensor, "N V"],
    labels_N: Int64[Tensor, " N"],
    *,
    ignore_index: int,
    z_loss: float,
    softcap: float | None,
) -> tuple[Sum, PerRow, PerRow]:
    """Sum the cross-entropy of rows of logits, all reductions in fp32.

    Args:
        logits_NV: Any floating dtype.
        labels_N: int64 in ``[0, V)``, or ``ignore_index``.
        ignore_index: Label of a row without a loss.
        z_loss: Weight of ``lse ** 2`` in a row's loss.
        softcap: Logits become ``softcap * tanh(logits / softcap)``; ``None`` leaves them.

    Returns:
        Loss sum, loss per row (0 where ignored) and natural-log LSE per row; all differentiable.
        With every label ignored the sum is a 0 that is still connected to the logits.

    Raises:
        ValueError: On a CPU, outside compiled code: a label is out of range. Elsewhere that
            row's loss and gradient, and with them the sum, become NaN.
        TypeError: Labels are not int64.

    Numerics:
        Logits are converted to fp32 first (fp64 stays fp64), so log-sum-exp, the loss and their
        gradients are fp32; the gradient is rounded once, to the logits' dtype.

    Source:
        PyTorch's own loss of bf16 logits is a bf16 scalar (relative error 2e-3).
    """
    check_options(z_loss=z_loss, softcap=softcap)
    V = logits_NV.shape[1]
    check_labels(labels_N, vocabulary=V, ignore_index=ignore_index)
    x_NV = logits_NV.to(accumulation_dtype(logits_NV.dtype))
    if softcap is not None:
        x_NV = softcap * torch.tanh(x_NV / softcap)
    lse_N = torch.logsumexp(x_NV, dim=1)
    index_N1 = labels_N.clamp(0, V - 1)[:, None]
    loss_N = lse_N - x_NV.gather(1, index_N1)[:, 0]
    if z_loss != 0:
        loss_N = loss_N + z_loss * lse_N.square()
    loss_N = loss_N * label_poison(labels_N, vocabulary=V, ignore_index=ignore_index)
    per_token_N = torch.where(labels_N == ignore_index, 0.0, loss_N)
    return per_token_N.sum(), per_token_N, lse_N
