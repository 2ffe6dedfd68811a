"""A clock for the parts of a training step: device time and peak memory between marks."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

GIB = 1024**3
STEP = "step"
DATA = "data, anchors, counts"
TARGET = "target, layers up to the last tap"
MASK = "mask"
DRAFT = "draft layers"
ATTENTION = "attention of all draft layers"
HEAD = "head and loss"
UPDATE = "clipping and optimizer"
FORWARD, BACKWARD = ", forward", ", backward"
PARTS = (
    DATA,
    TARGET,
    MASK,
    DRAFT + FORWARD,
    ATTENTION + FORWARD,
    HEAD + FORWARD,
    HEAD + BACKWARD,
    DRAFT + BACKWARD,
    ATTENTION + BACKWARD,
    UPDATE,
    STEP,
)
"""In the order of a step; attention is inside the draft layers, everything inside the step."""


@dataclass(frozen=True)
class Part:
    """One part of a step."""

    name: str
    time_ms: float
    """Median over steps of the sum over its calls; on a GPU the device's time."""
    calls: int
    """In the last step."""
    peak_gib: float | None
    """Most that was allocated during the part, in all; ``None`` on a CPU."""
    added_gib: float | None
    """Most that was allocated above what there was when it began."""


@dataclass
class _Span:
    begun: Any
    allocated: int
    ended: Any = None


@dataclass
class PartClock:
    """Marks where parts begin and end; the device's clock is read once, at the end.

    Peaks are the allocator's, which the host knows in the order of the program.
    """

    device: torch.device
    steps: list[dict[str, list[_Span]]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    _open: dict[str, _Span] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Start a step's marks."""
        self.steps.append({})
        self.begin(STEP)

    def begin(self, name: str) -> None:
        """A part begins."""
        self.sample()
        span = _Span(self._mark(), self._allocated())
        self._open[name] = span
        self.steps[-1].setdefault(name, []).append(span)

    def end(self, name: str) -> None:
        """It ends."""
        self.sample()
        self._open.pop(name).ended = self._mark()

    def is_open(self, name: str) -> bool:
        """Whether a part has begun and not ended."""
        return name in self._open

    def forget(self) -> None:
        """Drop what was measured: it was a warm-up."""
        self.steps, self.peaks, self.added = [], {}, {}

    def parts(self) -> tuple[Part, ...]:
        """Figures of everything that ran, in the order of a step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = []
        for name in PARTS:
            spans = [step[name] for step in self.steps if name in step]
            if spans:
                times = [sum(_elapsed_ms(span) for span in step) for step in spans]
                found.append(Part(name, statistics.median(times), len(spans[-1]), *self._gib(name)))
        return tuple(found)

    def step_ms(self) -> tuple[float, ...]:
        """Time of every step."""
        return tuple(_elapsed_ms(step[STEP][0]) for step in self.steps)

    def _gib(self, name: str) -> tuple[float | None, float | None]:
        if self.device.type != "cuda":
            return None, None
        return self.peaks[name] / GIB, self.added[name] / GIB

    def sample(self) -> None:
        """Give the peak since the last mark to every part that is under way."""
        if self.device.type != "cuda":
            return
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for name, span in self._open.items():
            self.peaks[name] = max(self.peaks.get(name, 0), peak)
            self.added[name] = max(self.added.get(name, 0), peak - span.allocated)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _elapsed_ms(span: _Span) -> float:
    if isinstance(span.begun, float):
        return (span.ended - span.begun) * 1e3
    return span.begun.elapsed_time(span.ended)
