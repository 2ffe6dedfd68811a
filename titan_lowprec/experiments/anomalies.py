"""What went wrong during a run, read from its records: spikes, skipped steps, restarts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from titan_lowprec.experiments.results import Record

Kind = Literal["spike", "skipped", "restart"]
WINDOW_STEPS = 50
"""Steps before a step that say what is usual."""
LEAST_STEPS = 10
SPIKE_DEVIATIONS = 8.0
"""A spike exceeds the window's median by so many median absolute deviations."""
SPIKE_NATS = 0.1
"""And by so much; a curve without noise has no spikes."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One event."""

    kind: Kind
    step: int
    tokens: int
    """Valid tokens seen."""
    loss: float
    text: str


def anomalies(train: Sequence[Record]) -> tuple[Anomaly, ...]:
    """Events of a run in the order of steps.

    A loss spike is an increase over the median of the 50 steps before by more than 0.1 nats and
    eight median absolute deviations. The first ten steps have none.
    """
    found: list[Anomaly] = []
    for index, record in enumerate(train):
        before = train[index - 1] if index else None
        texts: tuple[tuple[Kind, str], ...] = (
            ("restart", restart(before, record)),
            ("skipped", skipped(before, record)),
            ("spike", spike(train[max(0, index - WINDOW_STEPS) : index], record)),
        )
        found += [
            Anomaly(kind, record["step"], record["valid_tokens_seen"], record["loss"], text)
            for kind, text in texts
            if text
        ]
    return tuple(found)


def restart(before: Record | None, record: Record) -> str:
    """A step whose attempt is not that of the step before."""
    if before is None or before.get("attempt") == record.get("attempt"):
        return ""
    return f"attempt {record.get('attempt')} continues"


def skipped(before: Record | None, record: Record) -> str:
    """A step that raised the count of optimizer steps skipped."""
    earlier = before.get("skipped_steps", 0) if before else 0
    if record.get("skipped_steps", 0) <= earlier:
        return ""
    return f"not finite: loss {record['loss']:g}, gradient norm {record['grad_norm']:g}"


def spike(window: Sequence[Record], record: Record) -> str:
    """A loss far above those before it."""
    losses = [item["loss"] for item in window if math.isfinite(item["loss"])]
    if len(losses) < LEAST_STEPS or not math.isfinite(record["loss"]):
        return ""
    usual = median(losses)
    deviation = median(abs(loss - usual) for loss in losses)
    rise = record["loss"] - usual
    if rise <= max(SPIKE_NATS, SPIKE_DEVIATIONS * deviation):
        return ""
    return f"loss {record['loss']:.3f}, {rise:.3f} above the median of {len(losses)} steps"
