"""A head whose vocabulary is spread over processes: who holds what, and what they exchange.

Every process has the same rows and its own part of the vocabulary. Per chunk of rows one gather
carries three numbers a row and process; their combination has one order, so that all processes
get the same log-sum-exp and loss in every bit. The gradient of the rows is summed once.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_lowprec.shapes import Float, Tensor


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This process's rows of a head of ``vocabulary`` rows, cut as by ``torch.chunk``.

    Sizes differ where ``ranks`` does not divide ``vocabulary``: 50,257 over 2 is 25,129 + 25,128.
    """

    vocabulary: int
    """Rows of the whole head."""
    rank: int
    """Which part this process holds: its rank in the group."""
    ranks: int
    """Parts, one a process."""
    group: str
    """Name of the process group."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"VocabularyShard: rank must be in [0, {self.ranks}), got {self.rank}; "
                "use the rank in the group, not the global one"
            )
        if (self.ranks - 1) * self._stride >= self.vocabulary:  # the same answer on every rank
            raise ValueError(
                f"VocabularyShard: every process must hold a row, got {self.vocabulary} rows cut "
                f"into {self.ranks} parts of up to {self._stride}; use fewer processes"
            )

    @classmethod
    def of_group(cls, vocabulary: int, group: dist.ProcessGroup) -> "VocabularyShard":
        """The part of a head of ``vocabulary`` rows that this process of a group holds."""
        return cls(vocabulary, group.rank(), group.size(), group.group_name)

    @property
    def _stride(self) -> int:
        return -(-self.vocabulary // self.ranks)

    @property
    def first(self) -> int:
        """Token id of the first row held here."""
        return self.rank * self._stride

    @property
    def rows(self) -> int:
        """Number of rows held here."""
        return min(self._stride, self.vocabulary - self.first)

    def encode(self) -> str:
        """As a string, for the schema of a custom op."""
        return f"{self.vocabulary}/{self.rank}/{self.ranks}/{self.group}"

    @classmethod
    def decode(cls, text: str) -> "VocabularyShard":
        """Inverse of `encode`."""
        vocabulary, rank, ranks, group = text.split("/", 3)
        return cls(int(vocabulary), int(rank), int(ranks), group)


def check_shard(weight_VE: Tensor, shard: VocabularyShard) -> None:
    """Refuse a part of the head that is not the one the shard describes."""
    if weight_VE.shape[0] != shard.rows:
        raise ValueError(
            f"linear_cross_entropy: rank {shard.rank} of {shard.ranks} must hold {shard.rows} of "
            f"{shard.vocabulary} rows, got {weight_VE.shape[0]}; pass the local part of the head"
        )


@dataclass(frozen=True, slots=True)
class PartialRows:
    """Per row, what one process knows: ``sum = sum(exp(logit - shift))`` without the label."""

    shift_C: Float[Tensor, " C"]
    """Usually the largest logit; -inf where there is no column but the label's."""
    sum_C: Float[Tensor, " C"]
    target_C: Float[Tensor, " C"]
    """The label's logit where this process holds it, 0 elsewhere."""


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Per row, over the whole vocabulary."""

    log_others_C: Float[Tensor, " C"]
    """Log-sum-exp of all columns but the label's."""
    target_C: Float[Tensor, " C"]
    """The label's logit."""


def combine(part: PartialRows, shard: VocabularyShard | None) -> WholeRows:
    """Combine the processes' numbers (one gather); without a shard, this process has them all.

    Numerics:
        ``sum`` is rescaled to the largest shift and added up in the order of ranks, everywhere
        alike: results are equal on all processes, and with one process equal to ``logsumexp``.
    """
    mine_3C = torch.stack((part.shift_C, part.sum_C, part.target_C))
    all_R3C = mine_3C[None] if shard is None else _gather(mine_3C, shard)
    shift_RC, sum_RC, target_RC = all_R3C.unbind(1)
    shift_C = finite_shift(shift_RC.amax(0))
    total_C = (sum_RC * torch.exp(shift_RC - shift_C)).sum(0)
    return WholeRows(torch.log(total_C) + shift_C, target_RC.sum(0))


def finite_shift(shift_C: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
    """The shift, 0 in place of an infinity, which would make NaN of its own column."""
    return shift_C.masked_fill(shift_C.isinf(), 0.0)


def _gather(x_MK: Float[Tensor, "M K"], shard: VocabularyShard) -> Float[Tensor, "R M K"]:
    functional = torch.ops._c10d_functional
    gathered = functional.all_gather_into_tensor(x_MK, shard.ranks, shard.group)
    return functional.wait_tensor(gathered).view(shard.ranks, *x_MK.shape)


def sum_over_ranks(x_NE: Float[Tensor, "N E"], shard: VocabularyShard | None) -> None:
    """Add up the processes' values in place, in their own dtype."""
    if shard is not None and x_NE.numel() > 0:
        functional = torch.ops._c10d_functional
        functional.wait_tensor(functional.all_reduce_(x_NE, "sum", shard.group))
