"""Acceptance length of drafts against labels, by three conventions that must not be confused."""

from dataclasses import dataclass

import torch

from titan_lowprec.models.dflash.blocks import Blocks
from titan_lowprec.models.dflash.tables import FrozenTables
from titan_lowprec.shapes import Bool, Float, Int64, Tensor


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Counts that add up over micro-batches and ranks; the lengths are ratios of them.

    An acceptance length is the mean over blocks of one (the target's own token) plus the leading
    run of right drafts. It equals that of real decoding only where the labels are what the
    target would generate greedily. Accuracy is not an acceptance length.
    """

    blocks: Int64[Tensor, ""]
    """Blocks with a label that counts."""
    strict_run: Int64[Tensor, ""]
    """Sum of runs that end at the first slot that is wrong or does not count."""
    pass_through_run: Int64[Tensor, ""]
    """Sum of runs that end at the first wrong slot; slots that do not count are skipped."""
    correct_P: Int64[Tensor, " P"]
    """Right drafts of each slot."""
    valid_P: Int64[Tensor, " P"]
    """Slots that count."""

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        return AcceptanceCounts(
            self.blocks + other.blocks,
            self.strict_run + other.strict_run,
            self.pass_through_run + other.pass_through_run,
            self.correct_P + other.correct_P,
            self.valid_P + other.valid_P,
        )

    def strict(self) -> float:
        """Mean length where a slot that does not count ends the block; NaN without blocks."""
        return float(1 + self.strict_run.double() / self.blocks)

    def pass_through(self) -> float:
        """Mean length where a slot that does not count neither breaks nor adds."""
        return float(1 + self.pass_through_run.double() / self.blocks)

    def pooled(self) -> float:
        """Length from each slot's mean accuracy, as if slots were independent: understates."""
        accuracy = self.correct_P[1:].double() / self.valid_P[1:].clamp(min=1)
        if int(self.blocks) == 0:
            return float("nan")
        return float(1 + accuracy.cumprod(0).sum())


def count_acceptance(
    correct_BAP: Bool[Tensor, "B A P"], valid_BAP: Bool[Tensor, "B A P"]
) -> AcceptanceCounts:
    """Count leading runs of right drafts.

    Args:
        correct_BAP: Whether the draft equals the label; anything where the slot does not count.
        valid_BAP: Slots that count; never slot 0, the anchor.
    """
    right = correct_BAP & valid_BAP
    strict = right[..., 1:].long().cumprod(-1).sum()
    unbroken = (correct_BAP | ~valid_BAP)[..., 1:].long().cumprod(-1)
    return AcceptanceCounts(
        blocks=valid_BAP.any(-1).sum(),
        strict_run=strict,
        pass_through_run=(unbroken * valid_BAP[..., 1:]).sum(),
        correct_P=right.sum((0, 1)),
        valid_P=valid_BAP.sum((0, 1)),
    )


@torch.no_grad()
def correct_drafts(
    hidden_BTE: Float[Tensor, "B T E"], blocks: Blocks, tables: FrozenTables, *, chunk_rows: int
) -> Bool[Tensor, "B A P"]:
    """Tell where the largest logit is the label's, ``chunk_rows`` rows of logits at a time."""
    hidden_NE, label_N = hidden_BTE.flatten(0, 1), blocks.label_BT.flatten()
    chunks = zip(hidden_NE.split(chunk_rows), label_N.split(chunk_rows), strict=True)
    correct_N = torch.cat([tables.logits(h).argmax(-1) == label for h, label in chunks])
    return correct_N.view(blocks.label_BT.shape).unflatten(1, (-1, blocks.block_tokens))
