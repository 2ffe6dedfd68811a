"""What one optimizer step contains, counted on the host and summed over ranks."""

from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from titan_lowprec.data.fingerprint import fingerprint_rows
from titan_lowprec.titan.loss import IGNORE_INDEX

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Sums over the rows of a step; every field adds up over microbatches and ranks."""

    tokens: int
    valid_tokens: int
    rows: int
    documents: int
    padding_tokens: int
    attention_pairs: int
    fingerprint: int
    """Sum of the rows' 64-bit hashes, as a signed integer modulo 2**64."""

    @classmethod
    def of(cls, microbatches: list[Batch]) -> "StepCounts":
        """Count a rank's microbatches, which are still on the host."""
        totals = [0] * len(fields(cls))
        for inputs, labels in microbatches:
            lengths = inputs["cu_seqlens"].diff(dim=-1).to(torch.int64)
            documents_tokens = int(lengths.sum())
            one = cls(
                tokens=labels.numel(),
                valid_tokens=int((labels != IGNORE_INDEX).sum()),
                rows=labels.shape[0],
                documents=int((lengths > 0).sum()),
                padding_tokens=labels.numel() - documents_tokens,
                attention_pairs=int((lengths * (lengths + 1) // 2).sum()),
                fingerprint=fingerprint_rows(inputs["input"], labels),
            )
            totals = [a + b for a, b in zip(totals, astuple(one), strict=True)]
        totals[-1] = signed_64(totals[-1])
        return cls(*totals)

    @property
    def fingerprint_hex(self) -> str:
        """The fingerprint as 16 hexadecimal digits."""
        return f"{self.fingerprint % 2**64:016x}"


def signed_64(value: int) -> int:
    """The signed 64-bit integer that is congruent to ``value`` modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


def reads_rows_first(parallel_dims: ParallelDims) -> bool:
    """Whether this rank counts for its rows: tensor-parallel ranks hold the same."""
    return parallel_dims.non_data_parallel_size == 1 or (
        parallel_dims.tp_enabled and parallel_dims.get_mesh("tp").get_local_rank() == 0
    )


def sum_over_ranks(
    counts: StepCounts, *, stop: bool, contributes: bool, device: torch.device
) -> torch.Tensor:
    """Sum counts over all ranks in one collective that the host does not wait for.

    Args:
        counts: This rank's.
        stop: This rank wants to stop after the step.
        contributes: False for ranks that hold the same rows as another (tensor parallel).
        device: Where the process group reduces.

    Returns:
        int64 sums for ``read_sums``: on the host for one process, else on ``device``.
    """
    values = astuple(counts) if contributes else (0,) * len(fields(counts))
    vector = torch.tensor([*values, int(stop)], dtype=torch.int64)
    if dist.get_world_size() == 1:
        return vector
    if device.type == "cuda":
        vector = vector.pin_memory()
    vector = vector.to(device, non_blocking=True)
    dist.all_reduce(vector)
    return vector


def loss_denominator(sums: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    """The step's valid tokens, at least 1, as a fp32 scalar on the device."""
    index = [field.name for field in fields(StepCounts)].index("valid_tokens")
    if sums.device == device:
        return sums[index].clamp(min=1).to(torch.float32)
    return torch.full((), float(max(int(sums[index]), 1)), device=device, dtype=torch.float32)


def read_sums(sums: torch.Tensor) -> tuple[StepCounts, bool]:
    """The counts, and whether any rank wants to stop; ``sums`` on the host."""
    *totals, stops = sums.tolist()
    return StepCounts(*totals), stops > 0
