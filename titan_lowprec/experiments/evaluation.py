"""Tables of evaluations: validation loss under several attentions, and downstream tasks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum

from titan_lowprec.experiments.estimates import Estimate, estimate
from titan_lowprec.experiments.report_table import MISSING, interval, markdown_table

Rows = list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class LossResult:
    """One checkpoint under one attention."""

    run: str
    step: int
    attention: str
    """``native``, or a recipe."""
    loss_sums: tuple[float, ...]
    """Summed loss of each validation batch, nats."""
    tokens: tuple[int, ...]
    """Valid tokens of each batch."""

    @property
    def loss(self) -> float:
        """Mean over all tokens."""
        return fsum(self.loss_sums) / max(sum(self.tokens), 1)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One model on one downstream task."""

    model: str
    task: str
    metric: str
    scores: tuple[float, ...]
    """Of each document, in the order of the task."""

    @property
    def mean(self) -> float:
        """The task's score."""
        return fsum(self.scores) / len(self.scores)


def loss_difference(left: LossResult, right: LossResult) -> Estimate:
    """Left minus right over the same batches; the interval is over batches.

    Raises:
        ValueError: The batches differ.
    """
    if left.tokens != right.tokens:
        raise ValueError(
            "evaluation: results must come from the same batches, got "
            f"{sum(left.tokens)} and {sum(right.tokens)} tokens; evaluate them in one command"
        )
    scale = len(left.tokens) / max(sum(left.tokens), 1)
    pairs = zip(left.loss_sums, right.loss_sums, strict=True)
    return estimate([(a - b) * scale for a, b in pairs])


LOSS_HEADER = (
    "run",
    "step",
    "attention",
    "loss",
    "to native",
    "95 % interval",
    "to the first run",
    "95 % interval",
)


def loss_rows(results: Sequence[LossResult]) -> Rows:
    """A row per run and attention; the first run is the baseline of the others."""
    by_key = {(result.run, result.step, result.attention): result for result in results}
    first = results[0]
    rows: Rows = []
    for result in results:
        native = by_key.get((result.run, result.step, "native"))
        base = by_key.get((first.run, first.step, result.attention))
        rows.append(
            (
                result.run,
                str(result.step),
                result.attention,
                f"{result.loss:.5f}",
                *difference_cells(result, native),
                *difference_cells(result, base),
            )
        )
    return rows


def difference_cells(result: LossResult, other: LossResult | None) -> tuple[str, str]:
    """Difference and interval, dashes for a result and itself."""
    if other is None or other is result:
        return MISSING, MISSING
    difference = loss_difference(result, other)
    return f"{difference.mean:+.5f}", interval(difference, digits=5)


def loss_report(results: Sequence[LossResult]) -> str:
    """The table with what must be known to read it, as Markdown."""
    tokens, batches = sum(results[0].tokens), len(results[0].tokens)
    return (
        f"{markdown_table(LOSS_HEADER, loss_rows(results))}\n\n"
        f"Mean fp32 cross-entropy without z-loss, nats per token, over {tokens:,} valid tokens in "
        f"{batches} batches, the same for every row. *to native*: minus the same checkpoint's loss "
        "under the attention it trained with. *to the first run*: minus the first run's under the "
        f"same attention. Intervals: Student's t over the {batches} batches, so they speak of this "
        "text, not of other seeds.\n"
    )


TASK_HEADER = (
    "task",
    "metric",
    "documents",
    "model",
    "score",
    "to the first model",
    "95 % interval",
)


def task_rows(results: Sequence[TaskResult]) -> Rows:
    """A row per task, metric and model; the first model is the baseline of the others.

    Raises:
        ValueError: Models were evaluated on different documents.
    """
    bases: dict[tuple[str, str], TaskResult] = {}
    rows: Rows = []
    for result in sorted(results, key=lambda result: (result.task, result.metric)):
        base = bases.setdefault((result.task, result.metric), result)
        if len(base.scores) != len(result.scores):
            raise ValueError(
                f"evaluation: {result.task} must have the same documents for every model, got "
                f"{len(base.scores)} and {len(result.scores)}; use one --limit"
            )
        difference = None
        if base is not result:
            pairs = zip(result.scores, base.scores, strict=True)
            difference = estimate([a - b for a, b in pairs])
        rows.append(
            (
                result.task,
                result.metric,
                str(len(result.scores)),
                result.model,
                f"{result.mean:.4f}",
                MISSING if difference is None else f"{difference.mean:+.4f}",
                interval(difference),
            )
        )
    return rows


def mean_rows(results: Sequence[TaskResult]) -> Rows:
    """Per metric, each model's mean over tasks, for which there is no interval."""
    means: dict[tuple[str, str], list[float]] = {}
    for result in results:
        means.setdefault((result.metric, result.model), []).append(result.mean)
    return [
        (f"mean of {len(values)} tasks", metric, MISSING, model, score(values), MISSING, MISSING)
        for (metric, model), values in means.items()
        if len(values) > 1
    ]


def score(values: Sequence[float]) -> str:
    """The mean of scores."""
    return f"{fsum(values) / len(values):.4f}"


def task_report(results: Sequence[TaskResult], *, note: str) -> str:
    """Every task, then the means, as Markdown."""
    table = markdown_table(TASK_HEADER, [*task_rows(results), *mean_rows(results)])
    return (
        f"{table}\n\nDifferences are paired by document; intervals are Student's t over documents. "
        f"{note}\n"
    )


def to_json(results: Sequence[LossResult | TaskResult], *, about: Mapping[str, object]) -> str:
    """Everything that the tables are computed from."""
    return json.dumps({**about, "results": [asdict(result) for result in results]}, indent=1) + "\n"
