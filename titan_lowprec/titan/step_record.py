"""What is known of an optimizer step: at once on the host, and after the device is done."""

import re
from dataclasses import dataclass

from torchtitan.components.metrics import DeviceMemStats

from titan_lowprec.titan.outcome import Outcome


@dataclass(frozen=True, slots=True)
class StepNote:
    """The host's part of a step, taken when its work was queued."""

    step: int
    lr: float
    data_wait_s: float
    memory: DeviceMemStats
    """Peak since the step before."""
    graph_replays: int
    graph_over_capacity: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, summed over all ranks and microbatches."""

    step: int
    loss: float
    """Mean over the step's valid tokens."""
    grad_norm: float
    """Norm before clipping."""
    lr: float
    tokens_seen: int
    """Tokens of all rows read since the run began, padding included."""
    valid_tokens_seen: int
    """Tokens with a label since the run began."""
    valid_tokens: int
    rows: int
    documents: int
    padding_tokens: int
    attention_pairs: int
    """Visible (query, key) pairs of one layer."""
    skipped_steps: int
    """Optimizer steps skipped so far because loss or gradients were not finite."""
    fingerprint: str
    """Sum of the batch's row hashes modulo 2^64, 16 hexadecimal digits."""
    data_wait_s: float
    """Time that rank 0 waited for the loader."""
    graph_replays: int = 0
    """Microbatches that rank 0 replayed from its CUDA graph since it started."""
    graph_over_capacity: int = 0
    """Microbatches that it ran eagerly because a row had too many documents for the graph."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{16}", self.fingerprint):
            raise ValueError(
                "StepRecord: fingerprint must be 16 lower-case hexadecimal digits, got "
                f'{self.fingerprint!r}; format the 64-bit sum with f"{{value:016x}}"'
            )

    @classmethod
    def of(
        cls,
        note: StepNote,
        outcome: Outcome,
        *,
        tokens_seen: int,
        valid_tokens_seen: int,
        skipped_steps: int,
    ) -> "StepRecord":
        """The record of a finished step; the keywords include it."""
        counts = outcome.counts
        return cls(
            step=note.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=note.lr,
            tokens_seen=tokens_seen,
            valid_tokens_seen=valid_tokens_seen,
            valid_tokens=counts.valid_tokens,
            rows=counts.rows,
            documents=counts.documents,
            padding_tokens=counts.padding_tokens,
            attention_pairs=counts.attention_pairs,
            skipped_steps=skipped_steps,
            fingerprint=counts.fingerprint_hex,
            data_wait_s=note.data_wait_s,
            graph_replays=note.graph_replays,
            graph_over_capacity=note.graph_over_capacity,
        )
