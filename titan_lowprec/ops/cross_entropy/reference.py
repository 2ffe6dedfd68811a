"""Linear cross-entropy in PyTorch: any floating dtype, any device; the specification."""

import torch
from jaxtyping import Int16

from titan_lowprec.ops.cross_entropy.common import (
    Formed,
    HeadSpec,
    accumulation_dtype,
    join_float32,
    row_scale,
    split_float32,
    splits,
    usable_rows,
)
from titan_lowprec.ops.cross_entropy.shards import (
    PartialRows,
    VocabularyShard,
    combine,
    finite_shift,
    sum_over_ranks,
)
from titan_lowprec.shapes import Float, Int64, Tensor


def form_reference(
    hidden_NE: Float[Tensor, "N E"],
    weight_VE: Float[Tensor, "V E"],
    labels_N: Int64[Tensor, " N"],
    token_weight_N: Float[Tensor, " N"] | None,
    *,
    spec: HeadSpec,
    shard: VocabularyShard | None,
    need_hidden: bool,
    need_weight: bool,
) -> Formed:
    """Losses, and the gradients of their sum, before any rounding to the operands' dtype.

    With a shard, ``weight_VE`` and its gradient are this process's part of the head.

    Numerics:
        Logits, probabilities and both gradients are fp32 products of exactly converted operands
        (fp64 for fp64); dW is one fp32 sum over all chunks. With ``margin`` the log-sum-exp of
        the other columns less the label's logit, the loss is ``log(1 + exp(margin))`` and the
        label's coefficient ``-sigmoid(margin)``, so a confident row loses no digits. The dX of
        several shards is summed in fp32, once, after the last chunk.

    Source:
        Gradients formed in the forward pass: Liger-Kernel (arXiv:2410.10989), which by default
        adds up dW in the weight's dtype.
    """
    dtype = accumulation_dtype(hidden_NE.dtype)
    weight = weight_VE.to(dtype)
    (N, E), V = hidden_NE.shape, weight.shape[0]
    all_V = V if shard is None else shard.vocabulary
    scale_N = row_scale(labels_N, token_weight_N, vocabulary=all_V, ignore_index=spec.ignore_index)
    scale_N = scale_N.to(dtype)
    label_N = labels_N.clamp(0, all_V - 1) - (0 if shard is None else shard.first)
    hidden_NE = usable_rows(hidden_NE, scale_N)
    per_token_N = weight.new_empty(N)
    lse_N = weight.new_empty(N)
    grad_hidden_NE = weight.new_empty((N if need_hidden else 0, E))
    grad_weight_VE = weight.new_zeros((V if need_weight else 0, E))
    for start in range(0, N, spec.chunk_rows):
        rows = slice(start, start + spec.chunk_rows)
        scale_C = scale_N[rows]
        x_CE = hidden_NE[rows].to(dtype)
        loss_C, lse_N[rows], grad_CV = _loss_and_gradient(
            x_CE @ weight.T, label_N[rows], spec, shard
        )
        per_token_N[rows] = scale_C * loss_C
        grad_CV.mul_(scale_C[:, None])
        if need_hidden:
            grad_hidden_NE[rows] = grad_CV @ weight
        if need_weight:
            grad_weight_VE.addmm_(grad_CV.T, x_CE)
    sum_over_ranks(grad_hidden_NE, shard)
    low = torch.empty((0, E), dtype=torch.int16, device=weight.device)
    high = grad_weight_VE
    if splits(weight_VE.dtype):
        high, low = split_float32(grad_weight_VE)
    return Formed(per_token_N.sum(), per_token_N, lse_N, grad_hidden_NE, high, low)


def _loss_and_gradient(
    logits_CV: Float[Tensor, "C V"],
    label_C: Int64[Tensor, " C"],
    spec: HeadSpec,
    shard: VocabularyShard | None,
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Float[Tensor, "C V"]]:
    """Loss, LSE and gradient of the loss in the logits, for every row as if none were ignored.

    ``label_C`` counts from the first column held here; most labels of a shard lie outside.
    """
    if spec.softcap is not None:
        logits_CV = spec.softcap * torch.tanh(logits_CV / spec.softcap)
    index_C1 = label_C.clamp(0, logits_CV.shape[1] - 1)[:, None]
    here_C1 = index_C1 == label_C[:, None]
    at_index_C1 = logits_CV.gather(1, index_C1)
    others_CV = logits_CV.scatter(1, index_C1, at_index_C1.masked_fill(here_C1, -torch.inf))
    shift_C = others_CV.amax(1)
    sum_C = torch.exp(others_CV - finite_shift(shift_C)[:, None]).sum(1)
    target_C = torch.where(here_C1, at_index_C1, 0.0)[:, 0]
    whole = combine(PartialRows(shift_C, sum_C, target_C), shard)
    margin_C = whole.log_others_C - whole.target_C
    lse_C = torch.logaddexp(whole.log_others_C, whole.target_C)
    loss_C = torch.logaddexp(margin_C, torch.zeros_like(margin_C))
    loss_C = loss_C + spec.z_loss * lse_C.square()

    slope_C = 2.0 * spec.z_loss * lse_C
    grad_CV = torch.exp(others_CV - lse_C[:, None]) * (1.0 + slope_C)[:, None]
    label_gradient_C = slope_C * torch.sigmoid(-margin_C) - torch.sigmoid(margin_C)
    at_index_C1 = torch.where(here_C1, label_gradient_C[:, None], grad_CV.gather(1, index_C1))
    grad_CV.scatter_(1, index_C1, at_index_C1)
    if spec.softcap is not None:
        grad_CV *= 1.0 - (logits_CV / spec.softcap).square()
    return loss_C, lse_C, grad_CV


def round_reference(
    out_VE: Int16[Tensor, "V E"],
    high_VE: Int16[Tensor, "V E"],
    low_VE: Int16[Tensor, "V E"],
    factor: Float[Tensor, ""],
    dtype: torch.dtype,
) -> None:
    """Fill ``out_VE`` (which may be ``high_VE``) with the bits of ``factor * value`` in ``dtype``.

    Numerics:
        One product in fp32 and one rounding, to nearest, ties to even.

    Source:
        Multiplying an already rounded gradient rounds twice: 1.4 times the error.
    """
    value_VE = join_float32(high_VE, low_VE) * factor
    out_VE.copy_(value_VE.to(dtype).view(torch.int16))
