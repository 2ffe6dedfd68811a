"""The two objectives of a draft: weighted cross-entropy whose denominator is known beforehand."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from titan_lowprec.models.dflash.blocks import IGNORE_INDEX, Blocks
from titan_lowprec.models.dflash.tables import FrozenTables
from titan_lowprec.ops.cross_entropy.api import linear_cross_entropy
from titan_lowprec.shapes import Bool, Float, Float32, Int64, Tensor

Objective = Literal["decay", "dpace"]
"""``decay``: the paper's exponential decay. ``dpace``: weights from the draft's own confidence."""

DraftHead = Literal["reference", "triton", "logits_bf16"]
"""Implementations of `linear_cross_entropy`, or the bf16 log-softmax that other trainers store
(an ablation)."""

DPACE_SMOOTHING = 0.5
"""D-PACE's floor under the chance that a token is accepted."""


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """A micro-batch's share of the loss of a step."""

    loss_sum: Float[Tensor, ""]
    """Weighted sum; divide by the step's denominator, `mean_loss`."""
    weight_BT: Float32[Tensor, "B T"]
    """What each token's cross-entropy was multiplied by."""
    per_token_BT: Float[Tensor, "B T"]
    """Weighted cross-entropy of each token, detached."""


def denominator(blocks: Blocks, *, objective: Objective) -> Float32[Tensor, ""]:
    """Return what a micro-batch adds to the step's denominator, before any forward pass.

    The sum over all ranks and micro-batches of the step divides the loss. ``decay``: the sum of
    weights. ``dpace``: the number of blocks with a label that counts, because dividing by weights
    that follow from the forward pass would cancel the objective.
    """
    check_objective(objective)
    if objective == "decay":
        return blocks.decay_BT.double().sum().float()
    return blocks.valid_BAP.any(-1).sum().float()


def dpace_weights(
    probability_BAP: Float[Tensor, "B A P"], valid_BAP: Bool[Tensor, "B A P"]
) -> Float32[Tensor, "B A P"]:
    """Weigh tokens by what they add to the expected run of accepted tokens.

    With ``s = (1 - a) q + a`` and ``P_k`` the product of ``s`` up to slot ``k``, token ``k``
    weighs the sum of ``P_i`` for ``i >= k``. Slots that do not count neither shorten the product
    nor add to the sum.

    Args:
        probability_BAP: Probability ``q`` of each label; anything where a slot does not count.
        valid_BAP: Slots that count.

    Source:
        arXiv:2605.18810, with a = 0.5.
    """
    q = probability_BAP.detach().float()
    chance = (1 - DPACE_SMOOTHING) * q + DPACE_SMOOTHING
    reached = chance.masked_fill(~valid_BAP, 1.0).cumprod(-1) * valid_BAP
    return reached.flip(-1).cumsum(-1).flip(-1) * valid_BAP


def draft_loss(
    hidden_BTE: Float[Tensor, "B T E"],
    blocks: Blocks,
    tables: FrozenTables,
    *,
    objective: Objective,
    chunk_rows: int,
    impl: DraftHead,
) -> DraftLoss:
    """Sum the weighted cross-entropy of all blocks without keeping the logits.

    With no label that counts the sum is a 0 connected to ``hidden_BTE``, so that a rank without
    anchors takes part in every collective of the backward pass.

    Args:
        hidden_BTE: Normed hidden states of the draft, in the head's dtype.
        blocks: Labels and decay.
        tables: The target's frozen head; no gradient of it is formed.
        objective: See `Objective`.
        chunk_rows: Rows whose logits exist at once.
        impl: Implementation of the head.

    Numerics:
        As `linear_cross_entropy`, or `bf16_cross_entropy`. D-PACE runs the head once more,
        without gradients, because its weights must be known before the one rounding of the
        gradient.
    """
    check_objective(objective)
    hidden_NE = hidden_BTE.flatten(0, 1)

    def head(weight_N: Tensor | None) -> tuple[Tensor, Tensor]:
        loss_sum, per_token_N = weighted_cross_entropy(
            hidden_NE, blocks.label_BT.flatten(), weight_N, tables, chunk_rows=chunk_rows, impl=impl
        )
        return loss_sum, per_token_N.view(blocks.label_BT.shape)

    weight_BT = blocks.decay_BT
    if objective == "dpace":
        with torch.no_grad():
            per_token_BT = head(None)[1]
        probability_BAP = torch.exp(-per_token_BT).unflatten(1, (-1, blocks.block_tokens))
        weight_BT = dpace_weights(probability_BAP, blocks.valid_BAP).flatten(1)
    loss_sum, per_token_BT = head(weight_BT.flatten())
    return DraftLoss(loss_sum, weight_BT, per_token_BT)


def weighted_cross_entropy(
    hidden_NE: Float[Tensor, "N E"],
    label_N: Int64[Tensor, " N"],
    weight_N: Float32[Tensor, " N"] | None,
    tables: FrozenTables,
    *,
    chunk_rows: int,
    impl: DraftHead,
) -> tuple[Float[Tensor, ""], Float[Tensor, " N"]]:
    """Run the target's head over hidden states: the sum, and each row's loss, detached."""
    if tables.output_multiplier != 1.0:
        hidden_NE = hidden_NE * tables.output_multiplier
    if impl == "logits_bf16":
        return bf16_cross_entropy(hidden_NE, label_N, weight_N, tables, chunk_rows=chunk_rows)
    loss_sum, per_token_N, _ = linear_cross_entropy(
        hidden_NE,
        tables.head_VE,
        label_N,
        ignore_index=IGNORE_INDEX,
        chunk_rows=chunk_rows,
        z_loss=0.0,
        softcap=tables.softcap,
        token_weight_N=weight_N,
        impl=impl,
    )
    return loss_sum, per_token_N


def bf16_cross_entropy(
    hidden_NE: Float[Tensor, "N E"],
    label_N: Int64[Tensor, " N"],
    weight_N: Float32[Tensor, " N"] | None,
    tables: FrozenTables,
    *,
    chunk_rows: int,
) -> tuple[Float32[Tensor, ""], Float32[Tensor, " N"]]:
    """Sum the cross-entropy of bf16 logits whose log-softmax and loss are stored in bf16.

    What training without fp32 reductions computes, for comparison with it. Logits of
    ``chunk_rows`` rows exist at once; the backward pass forms them again.

    Returns:
        Sum over weighted rows, and the weighted loss of each row, detached.
    """
    head_VE = tables.head_VE.bfloat16()

    def rows(hidden: Tensor, label: Tensor) -> Tensor:
        logits = hidden.bfloat16() @ head_VE.T
        if tables.softcap is not None:
            logits = tables.softcap * torch.tanh(logits / tables.softcap)
        return F.cross_entropy(logits, label, ignore_index=IGNORE_INDEX, reduction="none")

    chunks = zip(hidden_NE.split(chunk_rows), label_N.split(chunk_rows), strict=True)
    # no random numbers are drawn, and a generator's state cannot be saved in a CUDA graph's capture
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    per_token = [checkpoint(rows, h, label, **options) for h, label in chunks]
    per_token_N = torch.cat(per_token).float()
    if weight_N is not None:
        per_token_N = per_token_N * weight_N
    return per_token_N.sum(), per_token_N.detach()


def mean_loss(
    loss_sum: Float[Tensor, ""], step_denominator: Float32[Tensor, ""]
) -> Float[Tensor, ""]:
    """Divide by the whole step's denominator; a step without any anchor is 0, not NaN."""
    return loss_sum / torch.where(step_denominator > 0, step_denominator, 1.0)


def check_objective(objective: str) -> None:
    """Refuse a name that is not an objective."""
    if objective not in get_args(Objective):
        raise ValueError(
            f"draft_loss: objective must be one of {get_args(Objective)}, got {objective!r}"
        )
