"""Ranges of single settings; what several settings must fulfil together is in ``config_rules``."""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_lowprec.titan.config_types import Problem


@dataclass(frozen=True, slots=True)
class Range:
    """Values that a number may take; ``None`` bounds nothing, ``also`` adds single values."""

    least: int | float | None = None
    above: int | float | None = None
    most: int | float | None = None
    below: int | float | None = None
    multiple_of: int | None = None
    also: tuple[int, ...] = ()

    def __contains__(self, value: int | float) -> bool:
        if value in self.also:
            return True
        if not math.isfinite(value):
            return False
        if self.multiple_of is not None and value % self.multiple_of != 0:
            return False
        bounds = (
            (operator.ge, self.least),
            (operator.gt, self.above),
            (operator.le, self.most),
            (operator.lt, self.below),
        )
        return all(bound is None or compare(value, bound) for compare, bound in bounds)

    def __str__(self) -> str:
        words = [
            f"{word} {bound:g}"
            for word, bound in (
                ("a multiple of", self.multiple_of),
                ("at least", self.least),
                ("above", self.above),
                ("at most", self.most),
                ("below", self.below),
            )
            if bound is not None
        ]
        return "be " + " and ".join(words) + "".join(f", or {value}" for value in self.also)

    def remedy(self, value: int | float) -> str:
        """What to do about a value outside of the range."""
        if not math.isfinite(value):
            return "use a finite number"
        if self.least is not None and value < self.least:
            return f"use {self.least:g} or more"
        if self.multiple_of is not None and value % self.multiple_of != 0:
            down = value // self.multiple_of * self.multiple_of
            return f"use {down + self.multiple_of}" + (f" or {down}" if down in self else "")
        if self.above is not None and value <= self.above:
            return "raise it"
        return f"use {self.most:g} or less" if self.most is not None else "lower it"


POSITIVE = Range(least=1)
NOT_NEGATIVE = Range(least=0)
FRACTION = Range(least=0, most=1)

RANGES = {
    "attention.tile_q": Range(least=32, multiple_of=32),
    "attention.tile_k": Range(least=32, multiple_of=32),
    "attention.weight_exponent": Range(least=0, most=8),
    "attention.max_lag": Range(least=0, most=8),
    "loss.chunk_rows": Range(least=128, multiple_of=128),
    "loss.z_loss": NOT_NEGATIVE,
    "loss.softcap": NOT_NEGATIVE,
    "data.max_documents": POSITIVE,
    "data.min_document_tokens": POSITIVE,
    "data.window_documents": POSITIVE,
    "data.seed": Range(least=0, below=2**64),
    "dflash.block_tokens": Range(least=2),
    "dflash.anchor_slots": POSITIVE,
    "dflash.anchor_seed": NOT_NEGATIVE,
    "dflash.gamma": NOT_NEGATIVE,
    "dflash.mask_id": Range(least=-1),
    "dflash.acceptance_freq": POSITIVE,
    "training.max_skipped_steps": POSITIVE,
    "graph.max_documents": NOT_NEGATIVE,
    "training.steps": POSITIVE,
    "training.seq_len": Range(least=2),
    "training.local_batch_size": POSITIVE,
    "training.global_batch_size": Range(least=1, also=(-1,)),
    "training.max_norm": Range(above=0),
    "training.gc_freq": POSITIVE,
    "training.dataloader.num_workers": NOT_NEGATIVE,
    "optimizer.lr": Range(above=0),
    "optimizer.beta1": Range(least=0, below=1),
    "optimizer.beta2": Range(least=0, below=1),
    "optimizer.eps": Range(above=0),
    "optimizer.weight_decay": NOT_NEGATIVE,
    "lr_scheduler.warmup_steps": NOT_NEGATIVE,
    "lr_scheduler.total_steps": POSITIVE,
    "lr_scheduler.decay_ratio": FRACTION,
    "lr_scheduler.min_lr_factor": FRACTION,
    "metrics.log_freq": POSITIVE,
    "metrics.health_every": NOT_NEGATIVE,
    "checkpoint.interval": POSITIVE,
    "checkpoint.keep_latest_k": NOT_NEGATIVE,
    "checkpoint.load_step": Range(least=0, also=(-1,)),
    "validation.freq": POSITIVE,
    "validation.local_batch_size": POSITIVE,
    "validation.steps": Range(least=1, also=(-1,)),
    "activation_checkpoint.memory_budget": FRACTION,
    "parallelism.data_parallel_replicate_degree": POSITIVE,
    "parallelism.data_parallel_shard_degree": Range(least=1, also=(-1,)),
    "parallelism.tensor_parallel_degree": POSITIVE,
    "parallelism.pipeline_parallel_degree": POSITIVE,
    "parallelism.context_parallel_degree": POSITIVE,
    "parallelism.expert_parallel_degree": POSITIVE,
    "parallelism.expert_tensor_parallel_degree": POSITIVE,
    "profiling.profile_freq": POSITIVE,
    "profiling.profiler_active": POSITIVE,
    "profiling.profiler_warmup": NOT_NEGATIVE,
    "comm.init_timeout_seconds": POSITIVE,
    "comm.train_timeout_seconds": POSITIVE,
    "debug.seed": Range(least=0, below=2**64),
}
"""Where a range comes from: the field's docstring in ``job_config`` or in TorchTitan's."""


def range_problems(config: Any, *, wrong_type: set[str]) -> Iterator[Problem]:
    """Compare numbers with their ranges; unset (``None``) values have none.

    Args:
        config: The job configuration.
        wrong_type: Keys that are no numbers at all and were reported already.
    """
    for key, allowed in RANGES.items():
        if key in wrong_type or any(key.startswith(f"{section}.") for section in wrong_type):
            continue
        value = operator.attrgetter(key)(config)
        if value is not None and value not in allowed:
            yield Problem(key, str(allowed), value, allowed.remedy(value))
