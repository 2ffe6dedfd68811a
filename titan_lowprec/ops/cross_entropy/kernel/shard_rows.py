"""Per-row work of a spread vocabulary, where the row's sum is known only after an exchange.

In place of `rows.statistics`, which goes from sums to gradient factors in one kernel. A handful
of PyTorch calls on one number a row: no new kernel, no synchronisation with the host.
"""

import math

import torch
import torch.nn.functional as F

from titan_lowprec.ops.cross_entropy.common import HeadSpec
from titan_lowprec.ops.cross_entropy.kernel.rows import LARGEST, SMALLEST
from titan_lowprec.ops.cross_entropy.shards import PartialRows, VocabularyShard, combine
from titan_lowprec.shapes import Float, Int32, Tensor

LN2 = math.log(2.0)


def flag_tiles(
    partial_CG: Float[Tensor, "C G"], redo_Q: Int32[Tensor, " Q"], *, tile_rows: int
) -> None:
    """Flag the row tiles in which a row's sum over this shard left the safe range."""
    total_C = partial_CG.sum(1)
    bad_C = ~((total_C >= SMALLEST.value) & (total_C <= LARGEST.value))
    padding = redo_Q.shape[0] * tile_rows - bad_C.shape[0]
    redo_Q.copy_(F.pad(bad_C, (0, padding)).view(-1, tile_rows).any(1))


def shard_statistics(
    partial_CG: Float[Tensor, "C G"],
    x_CE: Float[Tensor, "C E"],
    weight_VE: Float[Tensor, "V E"],
    label_C: Int32[Tensor, " C"],
    scale_C: Float[Tensor, " C"],
    shift_C: Float[Tensor, " C"],
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    *,
    spec: HeadSpec,
    shard: VocabularyShard,
) -> None:
    """Fill ``results`` as `rows.statistics` does; labels are -1 where another rank holds them.

    The stored exponentials have this shard's shift, so ``ratio`` is this shard's own, and
    ``coefficient`` is 0 where the label is another's.
    """
    lse_C, loss_C, ratio_C, coefficient_C, scaled_CE = results
    mine_C = label_C >= 0
    row_CE = weight_VE[label_C.clamp(min=0).long()]
    dot_C = (x_CE.float() * row_CE.float()).sum(1)
    slope_C = torch.ones_like(dot_C)
    if spec.softcap is not None:
        t_C = torch.tanh(dot_C / spec.softcap)
        dot_C, slope_C = t_C * spec.softcap, 1.0 - t_C * t_C
    sum_C = partial_CG.sum(1)
    # a shard without a column but the label's has no logit that its shift could stand for
    natural_C = torch.where(sum_C == 0, -torch.inf, shift_C * LN2)
    whole = combine(PartialRows(natural_C, sum_C, torch.where(mine_C, dot_C, 0.0)), shard)

    margin_C = whole.log_others_C - whole.target_C
    lse_C.copy_(torch.logaddexp(whole.log_others_C, whole.target_C))
    pull_C = 2.0 * spec.z_loss * lse_C
    loss = torch.logaddexp(margin_C, torch.zeros_like(margin_C)) + spec.z_loss * lse_C.square()
    ratio = (1.0 + pull_C) * torch.exp2(shift_C - lse_C / LN2)
    own = slope_C * (pull_C * torch.sigmoid(-margin_C) - torch.sigmoid(margin_C))
    off_C = scale_C == 0
    loss_C.copy_((scale_C * loss).masked_fill(off_C, 0.0))
    ratio_C.copy_((scale_C * ratio).masked_fill(off_C, 0.0))
    coefficient_C.copy_((scale_C * own).masked_fill(off_C | ~mine_C, 0.0))
    if scaled_CE is not None:
        scaled_CE.copy_((ratio_C[:, None] * x_CE.float()).masked_fill(off_C[:, None], 0.0))
