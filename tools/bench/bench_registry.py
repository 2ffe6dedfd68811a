"""What an op's benchmark module gives the runner.

``tools/bench/<op>.py`` defines four names; ``tools/bench/run.py --op <op>`` imports nothing else:

``TESTS``
    Paths given to pytest before anything is timed.
``cases(suite, device) -> list[Case]``
    The shapes of a suite; every module has ``"smoke"`` (seconds on a CPU) and ``"full"``.
``make_inputs(case, device) -> Any``
    Inputs (and a float64 truth, where wanted) that all implementations of a case share.
``IMPLEMENTATIONS: list[Implementation]``
    In the order of the table; the first one is the baseline of the printed ratio.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One shape: ``name`` is its id in the records, ``params`` whatever the module needs."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """One implementation, made ready for one case.

    Attributes:
        passes: Pass name (``"forward"``, ``"backward"``, ``"forward_backward"``) to a function
            without arguments that runs it once. Gradients are dropped by the function itself.
        flops: Pass name to useful operations; the module documents the model. Empty: no rate.
        result_bytes: Pass name to bytes of results (outputs, gradients) that do not count as
            extra memory; missing means 0.
        error: Returns the error of this implementation on this case (the module documents which).
        tolerance: ``error`` above this makes ``correct`` false; such a row gets no time.
    """

    passes: Mapping[str, Callable[[], Any]]
    flops: Mapping[str, float]
    error: Callable[[], float]
    tolerance: float
    result_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Implementation:
    """A named way to run the op.

    Attributes:
        name: Its id in the records.
        prepare: ``prepare(case, inputs) -> Workload``; may raise to refuse a case.
        unavailable: Returns why this implementation cannot run here, or ``None``.
    """

    name: str
    prepare: Callable[[Case, Any], Workload]
    unavailable: Callable[[torch.device], str | None] = lambda device: None
