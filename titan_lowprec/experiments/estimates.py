"""Means with confidence intervals over a few seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds; spread and interval need two of them."""

    mean: float
    count: int
    spread: float | None
    """Standard deviation over the seeds (divisor count - 1)."""
    low: float | None
    high: float | None
    """Ends of the two-sided 95 % confidence interval of the mean, Student's t."""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, spread and confidence interval of values that seeds gave independently.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("estimate: needs at least one value, got none; leave the arm out")
    count = len(values)
    finite = all(map(math.isfinite, values))
    mean = (math.fsum(values) if finite else sum(values)) / count  # fsum refuses inf - inf
    if count == 1 or not math.isfinite(mean):
        return Estimate(mean, count, None, None, None)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = t_quantile(0.5 + CONFIDENCE / 2, count - 1) * spread / math.sqrt(count)
    return Estimate(mean, count, spread, mean - half, mean + half)


def t_quantile(probability: float, freedom: int) -> float:
    """The value below which Student's t falls with a probability of at least one half."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return high


def t_cdf(value: float, freedom: int) -> float:
    """Student's t distribution for value >= 0, a finite series for whole degrees of freedom.

    Source:
        Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(value, math.sqrt(freedom))
    cos, sin = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, series = (cos if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        series += term
        term *= cos * cos * k / (k + 1)
    inside = sin * series
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return 0.5 + inside / 2
