"""Where blocks are drafted: candidates and the slots drawn from them before every step."""

from dataclasses import dataclass

import numpy as np
import torch

from titan_lowprec.shapes import Bool, Int, Int64, Tensor


@dataclass(frozen=True, slots=True)
class Anchors:
    """One step's anchors, a fixed number of slots for every row, ascending."""

    position_BA: Int64[Tensor, "B A"]
    """Index of the anchor in its row; the row's last index where the slot is not used."""
    keep_BA: Bool[Tensor, "B A"]
    """Whether the slot is used; unused slots come last."""

    def to(self, device: torch.device | str) -> "Anchors":
        """Copy to a device."""
        return Anchors(self.position_BA.to(device), self.keep_BA.to(device))


def anchor_candidates(
    loss_mask_BS: Bool[Tensor, "B S"], document_BS: Int[Tensor, "B S"]
) -> Bool[Tensor, "B S"]:
    """Mark tokens that count and whose successor counts too, in the same document.

    Args:
        loss_mask_BS: Tokens that the draft should learn to produce.
        document_BS: Document of each token, -1 in a tail of padding.
    """
    follows = torch.zeros_like(loss_mask_BS)
    same = document_BS[:, 1:] == document_BS[:, :-1]
    follows[:, :-1] = loss_mask_BS[:, 1:] & same
    return loss_mask_BS & follows & (document_BS >= 0)


class AnchorSampler:
    """Draws anchors uniformly without replacement; its state is three integers.

    A draw is a function of the seed and the row's number in the run: ranks need no communication,
    a run that resumes draws what it would have drawn, and neither the number of ranks nor the
    number of micro-batches of a step matters.
    """

    def __init__(self, *, seed: int, slots: int) -> None:
        if seed < 0 or slots < 1:
            raise ValueError(
                f"AnchorSampler: seed must be >= 0 and slots >= 1, got {seed} and {slots}"
            )
        self.seed = seed
        self.slots = slots
        self.rows = 0
        """Rows of all ranks that were drawn for."""

    def draw(
        self, candidates_BS: Bool[Tensor, "B S"], *, first_row: int, total_rows: int
    ) -> Anchors:
        """Draw one micro-batch's anchors and advance.

        Args:
            candidates_BS: From `anchor_candidates`, on the CPU (nothing waits for a device).
            first_row: Number of this rank's first row in the micro-batch of all ranks.
            total_rows: Rows of that micro-batch.
        """
        if candidates_BS.device.type != "cpu":
            raise ValueError(
                f"AnchorSampler: candidates must be on the CPU, got {candidates_BS.device}; draw "
                "before the batch is moved"
            )
        B, S = candidates_BS.shape
        if not 0 <= first_row <= total_rows - B:
            raise ValueError(
                f"AnchorSampler: rows {first_row} to {first_row + B} must lie in the micro-batch "
                f"of all ranks, got total_rows={total_rows}; count the rows of every rank"
            )
        position_BA = torch.full((B, self.slots), S - 1, dtype=torch.int64)
        keep_BA = torch.zeros(B, self.slots, dtype=torch.bool)
        for b in range(B):
            chosen = self._choose(candidates_BS[b].numpy(), row=self.rows + first_row + b)
            position_BA[b, : len(chosen)] = torch.from_numpy(chosen)
            keep_BA[b, : len(chosen)] = True
        self.rows += total_rows
        return Anchors(position_BA, keep_BA)

    def _choose(self, candidate_S: np.ndarray, *, row: int) -> np.ndarray:
        # Sorting Philox's raw output: NumPy keeps the stream of a bit generator over releases.
        # The counter's lower words count within the draw.
        counter = np.array([0, 0, row, 0], dtype=np.uint64)
        generator = np.random.Philox(key=np.array([self.seed, 0], np.uint64), counter=counter)
        index = np.flatnonzero(candidate_S)
        key = generator.random_raw(len(candidate_S))[index]
        return np.sort(index[np.argsort(key, kind="stable")[: self.slots]]).astype(np.int64)

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs."""
        return {"seed": self.seed, "slots": self.slots, "rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the rows of a checkpoint; refuse another seed or number of slots."""
        if (state["seed"], state["slots"]) != (self.seed, self.slots):
            raise ValueError(
                f"AnchorSampler: the checkpoint has seed {state['seed']} and {state['slots']} "
                f"slots, this run {self.seed} and {self.slots}; resume with the checkpoint's"
            )
        self.rows = state["rows"]
