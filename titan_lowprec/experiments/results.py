"""A sweep's numbers: one row per arm, compared with the baseline at equal tokens.

Everything is computed from ``metrics.jsonl``; ``read`` (``titan.metrics_file.read_metrics``) is
passed in. Tokens are valid tokens, those with a label, so arms that pack differently compare.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_lowprec.experiments.estimates import Estimate, estimate
from titan_lowprec.experiments.matrix import Matrix
from titan_lowprec.experiments.matrix_file import flatten
from titan_lowprec.experiments.resolution import Run
from titan_lowprec.experiments.run_state import METRICS_FILE, State, read_state

Record = dict[str, Any]
ReadMetrics = Callable[[Path], list[Record]]
"""The records of a ``metrics.jsonl`` that count, in step order."""


@dataclass(frozen=True, slots=True)
class History:
    """What one run recorded."""

    run: Run
    state: State
    train: tuple[Record, ...]
    validation: tuple[Record, ...]
    """Each with ``valid_tokens_seen`` of its step."""
    commit: str | None
    """Twelve digits, and ``-dirty`` if files had changed since."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One row of the table."""

    arm: str
    finished: int
    problems: tuple[str, ...]
    """Runs that failed or are not finished, each with its reason."""
    loss: Estimate | None
    difference: Estimate | None
    """Of pairs of equal seed, arm - baseline."""
    same_batches: bool | None
    """Whether arm and baseline saw the same batches; ``None`` without a pair."""
    tokens_per_s: float | None
    """Median over steps, mean over runs."""
    verdict: str


@dataclass(frozen=True, slots=True)
class Results:
    """The whole table."""

    matrix: Matrix
    tokens: int
    """Valid tokens at which losses are compared; 0 if nothing finished."""
    arms: tuple[ArmResult, ...]
    histories: tuple[History, ...]


def load_histories(runs: Sequence[Run], read: ReadMetrics) -> tuple[History, ...]:
    """Read the records of all runs; a run that has not begun has none."""
    return tuple(load_history(run, read) for run in runs)


def load_history(run: Run, read: ReadMetrics) -> History:
    """Read one run's records and state."""
    return history_of(run, read_state(run), read)


def history_of(run: Run, state: State, read: ReadMetrics) -> History:
    """Read the records of a run whose state is known."""
    path = run.folder / METRICS_FILE
    records = read(path) if path.is_file() else []
    train = tuple(record for record in records if record["kind"] == "train")
    tokens = {record["step"]: record["valid_tokens_seen"] for record in train}
    validation = tuple(
        {**record, "valid_tokens_seen": tokens[record["step"]]}
        for record in records
        if record["kind"] == "validation" and record["step"] in tokens
    )
    return History(run, state, train, validation, commit_of(run.folder / "run" / "versions.json"))


def commit_of(versions: Path) -> str | None:
    """The commit that a run recorded, marked if the code was not that of the commit."""
    recorded = json.loads(versions.read_text()) if versions.is_file() else {}
    commit = recorded.get("commit")
    return commit and commit[:12] + ("-dirty" if recorded.get("dirty") else "")


def summarise(matrix: Matrix, histories: Sequence[History]) -> Results:
    """Compute the table.

    Args:
        matrix: Metric, baseline and acceptable difference.
        histories: All runs of the matrix, whatever became of them. Those of an earlier state of the
            matrix are left out: their numbers answer another question.
    """
    histories = [item for item in histories if belongs(matrix, item.run)]
    tokens = common_tokens(matrix, histories)
    by_arm = {
        arm.name: [item for item in histories if item.run.arm == arm.name] for arm in matrix.arms
    }
    arms = tuple(
        arm_result(matrix, arm, items, by_arm[matrix.baselines[arm]], tokens)
        for arm, items in by_arm.items()
    )
    return Results(matrix, tokens, arms, tuple(histories))


def belongs(matrix: Matrix, run: Run) -> bool:
    """Whether a run is one of the matrix as it is now: arm, seed and all that they set."""
    if run.seed not in matrix.seeds:
        return False
    settings = flatten(run.config)
    for arm in matrix.arms:
        if arm.name == run.arm:
            wanted = {**matrix.extra, **arm.overrides}
            return all(key in settings and settings[key] == wanted[key] for key in wanted)
    return False


def common_tokens(matrix: Matrix, histories: Sequence[History]) -> int:
    """The most valid tokens at which every finished run has the metric."""
    ends = [
        records[-1]["valid_tokens_seen"]
        for item in histories
        if item.state.status == "finished"
        and (records := item.train if matrix.metric == "train" else item.validation)
    ]
    return min(ends, default=0)


def loss_at(matrix: Matrix, history: History, tokens: int) -> float | None:
    """A finished run's metric at a number of valid tokens, ``None`` if it has none there."""
    if history.state.status != "finished" or tokens == 0:
        return None
    if matrix.metric == "train":
        return tail_mean(history.train, tokens, matrix.tail_fraction)
    points = [
        (float(record["valid_tokens_seen"]), float(record["loss"])) for record in history.validation
    ]
    return interpolate(points, float(tokens))


def tail_mean(train: Sequence[Record], tokens: int, fraction: float) -> float | None:
    """Mean loss per valid token over the last ``fraction`` of ``tokens``; steps count whole."""
    chosen = [
        (record["loss"], record["valid_tokens"])
        for record in train
        if tokens * (1 - fraction) < record["valid_tokens_seen"] <= tokens
    ]
    weight = sum(valid for _, valid in chosen)
    return sum(loss * valid for loss, valid in chosen) / weight if weight else None


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """Linear interpolation between points of rising abscissa; ``None`` outside them."""
    place = bisect_left(points, (x, -math.inf))
    if place < len(points) and points[place][0] == x:
        return points[place][1]
    if place in (0, len(points)):
        return None
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def arm_result(
    matrix: Matrix, arm: str, items: Sequence[History], baseline: Sequence[History], tokens: int
) -> ArmResult:
    """One arm's row."""
    losses = {item.run.seed: loss_at(matrix, item, tokens) for item in items}
    base = {item.run.seed: loss_at(matrix, item, tokens) for item in baseline}
    values = [loss for loss in losses.values() if loss is not None]
    pairs = [
        (loss, other)
        for seed, loss in losses.items()
        if loss is not None and (other := base.get(seed)) is not None
    ]
    difference = estimate([loss - other for loss, other in pairs]) if pairs else None
    if arm == matrix.baselines[arm]:
        difference = None
    lacking = [seed for seed in matrix.seeds if seed not in losses]
    problems = (
        *(problem for item in items if (problem := problem_of(item))),
        *(f"seed {seed}: no run of the matrix as it is now" for seed in lacking),
    )
    return ArmResult(
        arm=arm,
        finished=sum(item.state.status == "finished" for item in items),
        problems=problems,
        loss=estimate(values) if values else None,
        difference=difference,
        same_batches=same_batches(items, baseline),
        tokens_per_s=speed(items),
        verdict=verdict(
            matrix, arm, items, difference, base=estimate([b for _, b in pairs]) if pairs else None
        ),
    )


def problem_of(item: History) -> str | None:
    """Why a run has no final number."""
    if item.state.status == "finished":
        return None
    done = item.train[-1]["step"] if item.train else 0
    text = f"seed {item.run.seed}: {item.state.status}"
    if item.state.status == "failed":
        return f"{text}, {item.state.reason}"
    return text if item.state.status == "new" else f"{text} at step {done} of {item.run.steps}"


def same_batches(items: Sequence[History], baseline: Sequence[History]) -> bool | None:
    """Whether pairs of equal seed have equal fingerprints at every step both have."""
    others = {item.run.seed: item for item in baseline}
    pairs = [
        (left["fingerprint"], right["fingerprint"])
        for item in items
        if item.run.seed in others
        for left, right in zip(item.train, others[item.run.seed].train, strict=False)
    ]
    return all(left == right for left, right in pairs) if pairs else None


def speed(items: Sequence[History]) -> float | None:
    """Valid tokens per second: the median step of each run, averaged over runs."""
    medians = []
    for item in items:
        rates = sorted(record["valid_tokens_per_s"] for record in item.train)
        if rates:
            medians.append(rates[len(rates) // 2])
    return sum(medians) / len(medians) if medians else None


def verdict(
    matrix: Matrix,
    arm: str,
    items: Sequence[History],
    difference: Estimate | None,
    *,
    base: Estimate | None,
) -> str:
    """Judge an arm by the acceptable difference; crashes and single seeds decide nothing good."""
    seeds = len(matrix.seeds)
    failed = sum(item.state.status == "failed" for item in items)
    if failed:
        return f"failed ({failed} of {seeds} seeds)"
    finished = sum(item.state.status == "finished" for item in items)
    if finished < seeds:
        return f"incomplete ({finished} of {seeds} seeds)"
    if arm == matrix.baselines[arm]:
        return "baseline"
    if difference is None:
        return "undecided (no pair with the baseline)"
    if base is not None and not math.isfinite(base.mean):
        return "undecided (the baseline's loss is not finite)"
    if not math.isfinite(difference.mean):
        return "not acceptable (loss not finite)"
    if difference.low is None or difference.high is None:
        return "undecided (one seed)"
    word = "undecided"
    if difference.high <= matrix.acceptable_difference:
        word = "acceptable"
    if difference.low > matrix.acceptable_difference:
        word = "not acceptable"
    lacking = difference.count < seeds  # the baseline has no number for a seed
    return f"{word} ({difference.count} of {seeds} pairs)" if lacking else word
