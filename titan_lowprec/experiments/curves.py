"""Curves of a panel: points of each run, thinned for drawing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from titan_lowprec.experiments.panels import Panel
from titan_lowprec.experiments.results import History, Results, interpolate

Point = tuple[float, float]
MOST_POINTS = 400


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a plot."""

    arm: str
    seed: int | None
    """``None`` is the mean over seeds."""
    points: tuple[Point, ...]
    finished: bool


def panel_curves(panel: Panel, results: Results) -> tuple[Curve, ...]:
    """All runs' curves of a panel, and each arm's mean where its seeds have equally many."""
    curves: list[Curve] = []
    for arm in results.arms:
        items = [item for item in results.histories if item.run.arm == arm.arm]
        mine = [
            Curve(arm.arm, item.run.seed, points, reached_end(item))
            for item in items
            if (points := run_points(panel, item, results))
        ]
        curves += mine
        if len(mine) > 1 and len({len(curve.points) for curve in mine}) == 1:
            mean = tuple(map(middle, zip(*(curve.points for curve in mine), strict=True)))
            curves.append(Curve(arm.arm, None, mean, all(curve.finished for curve in mine)))
    return tuple(curves)


def reached_end(item: History) -> bool:
    """Whether a run is finished and has its last step."""
    done = item.train[-1]["step"] if item.train else 0
    return item.state.status == "finished" and done >= item.run.steps


def run_points(panel: Panel, item: History, results: Results) -> tuple[Point, ...]:
    """One run's points, thinned."""
    if panel.kind == "difference":
        return difference_points(item, results)
    records = item.validation if panel.kind == "validation" else item.train
    return thin(raw_points(records, panel.axis, panel.local))


def raw_points(records: Sequence[dict[str, Any]], axis: str, key: str) -> list[Point]:
    """The finite numbers of a column."""
    return [
        (float(record[axis]), float(record[key]))
        for record in records
        if isinstance(record.get(key), int | float) and math.isfinite(record[key])
    ]


def difference_points(item: History, results: Results) -> tuple[Point, ...]:
    """Training loss minus the baseline's of equal seed, read at equal valid tokens."""
    baseline = results.matrix.baselines[item.run.arm]
    if item.run.arm == baseline:
        return ()
    others = [
        other
        for other in results.histories
        if (other.run.arm, other.run.seed) == (baseline, item.run.seed)
    ]
    reference = [point for other in others for point in raw_points(other.train, *LOSS_BY_TOKENS)]
    mine = raw_points(item.train, *LOSS_BY_TOKENS)
    return thin([(x, y - base) for x, y in mine if (base := interpolate(reference, x)) is not None])


LOSS_BY_TOKENS = ("valid_tokens_seen", "loss")


def thin(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most ``MOST_POINTS`` points; each is the mean of neighbours."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return tuple(points)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple(map(middle, groups))


def middle(points: Sequence[Point]) -> Point:
    """The mean of points."""
    return fmean(x for x, _ in points), fmean(y for _, y in points)
