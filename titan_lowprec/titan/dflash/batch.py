"""From a batch of packed rows to blocks: which tokens are learned, and the anchors drawn for it."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from titan_lowprec.models.dflash.anchors import Anchors, AnchorSampler, anchor_candidates
from titan_lowprec.models.dflash.args import DFlashArgs
from titan_lowprec.models.dflash.blocks import Blocks, draft_blocks
from titan_lowprec.shapes import Bool, Int, Tensor
from titan_lowprec.titan.loss import IGNORE_INDEX, Batch


@runtime_checkable
class RowLoader(Protocol):
    """Batches of packed rows with a state: `PackedLoader` or `FeatureLoader`."""

    batch_rows: int
    rank: int
    world_size: int

    def __next__(self) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def learned_tokens(
    labels_BS: Int[Tensor, "B S"], document_BS: Int[Tensor, "B S"]
) -> Bool[Tensor, "B S"]:
    """Tokens that some token has as its label, and a document's first if its second is one."""
    has_label = labels_BS != IGNORE_INDEX
    learned = has_label.clone()
    same = document_BS[:, 1:] == document_BS[:, :-1]
    learned[:, 1:] = (has_label[:, :-1] & same) | (has_label[:, 1:] & ~same)
    return learned & (document_BS >= 0)


def with_anchors(batch: Batch, sampler: AnchorSampler, *, first_row: int, total_rows: int) -> Batch:
    """Add ``loss_mask``, ``anchor_position`` and ``anchor_keep`` to a batch on the host."""
    inputs, labels = batch
    document = inputs["document_ids"]
    mask = inputs.get("loss_mask")
    if mask is None:
        mask = learned_tokens(labels, document)
    candidates = anchor_candidates(mask, document)
    anchors = sampler.draw(candidates, first_row=first_row, total_rows=total_rows)
    added = {
        "loss_mask": mask,
        "anchor_position": anchors.position_BA,
        "anchor_keep": anchors.keep_BA,
    }
    return inputs | added, labels


def anchors_of(inputs: dict[str, Tensor]) -> Anchors:
    """The anchors that `with_anchors` added."""
    return Anchors(inputs["anchor_position"], inputs["anchor_keep"])


def blocks_of(inputs: dict[str, Tensor], args: DFlashArgs) -> Blocks:
    """The blocks of a batch, on the host or on the device."""
    return draft_blocks(
        inputs["input"],
        loss_mask_BS=inputs["loss_mask"],
        document_BS=inputs["document_ids"],
        position_BS=inputs["positions"],
        anchors=anchors_of(inputs),
        args=args,
    )


class AnchoredLoader:
    """A loader of rows whose batches come with anchors, drawn when a batch is handed out.

    The anchors' state is saved with the loader's, so a cancelled or a resumed step draws the same.
    """

    def __init__(self, rows: RowLoader, sampler: AnchorSampler) -> None:
        self.rows, self.sampler = rows, sampler

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = self.rows
        return with_anchors(
            next(rows),
            self.sampler,
            first_row=rows.rank * rows.batch_rows,
            total_rows=rows.world_size * rows.batch_rows,
        )

    def state_dict(self) -> dict[str, Any]:
        """State of rows and anchors."""
        return {"rows": self.rows.state_dict(), "anchors": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the rows and the anchors that would have come next."""
        if set(state) != {"rows", "anchors"}:
            raise ValueError(
                f"AnchoredLoader: a state must have anchors and rows, got {sorted(state)}; it was "
                "saved by another model's run"
            )
        self.rows.load_state_dict(state["rows"])
        self.sampler.load_state_dict(dict(state["anchors"]))

    def close(self) -> None:
        """Stop what the loader of rows runs."""
        self.rows.close()
