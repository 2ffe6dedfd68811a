"""What came out of an optimizer step: decided on the device, read by the host one step later."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed._functional_collectives as funcol
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_lowprec.titan.counts import StepCounts, read_sums

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished step's figures, on the host."""

    loss: float
    grad_norm: float
    finite: bool
    counts: StepCounts
    stop: bool
    """Some rank wants to stop after the step."""
    step_time_s: float | None
    """Time between the ends of two steps' work on the device; ``None`` where it has no clock."""


@runtime_checkable
class Optimizers(Protocol):
    """TorchTitan's container of optimizers."""

    optimizers: list[Any]

    def step(self) -> None: ...


def is_finite(loss: Tensor, grad_norm: Tensor) -> Tensor:
    """Whether a step may be taken, as a bool scalar where its figures are."""
    return torch.isfinite(loss) & torch.isfinite(grad_norm)


def loss_over_ranks(loss: Tensor, parallel_dims: ParallelDims) -> Tensor:
    """Sum of every data-parallel rank's share of the step's loss, where it is."""
    if parallel_dims.dp_enabled:
        return funcol.all_reduce(loss, "sum", parallel_dims.get_mesh("batch"))
    return loss


def step_if_finite(
    optimizers: Optimizers, finite: Tensor, *, grad_scale: Tensor | None = None
) -> None:
    """Take the optimizer step, or leave parameters, moments and step counts as they are.

    A fused optimizer reads the decision on the device (its ``found_inf``, made for gradient
    scaling); other implementations have no such input, and the host waits for it.

    Args:
        optimizers: Whose gradients are there.
        finite: Whether to take the step, a bool scalar.
        grad_scale: What fused optimizers divide gradients by.

    Raises:
        ValueError: A scale, and an optimizer that would not read it.
    """
    fused = all(optimizer.defaults.get("fused") for optimizer in optimizers.optimizers)
    if not fused:
        if grad_scale is not None:
            raise ValueError(
                "step_if_finite: fused optimizers are required for a grad_scale, got others; set "
                'optimizer.implementation = "fused"'
            )
        if bool(finite):
            optimizers.step()
        return
    inputs = {"found_inf": (~finite).to(torch.float32)}
    if grad_scale is not None:
        inputs["grad_scale"] = grad_scale
    for optimizer in optimizers.optimizers:
        vars(optimizer).update(inputs)
    try:
        optimizers.step()
    finally:
        for optimizer in optimizers.optimizers:
            for name in inputs:
                delattr(optimizer, name)


class NonFiniteRun(RuntimeError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


class SkippedSteps:
    """Optimizer steps that were not taken because they were not finite."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self.in_a_row = 0
        self.limit = limit

    def count(self, step: int, outcome: Outcome) -> None:
        """Take note of a step's outcome."""
        if outcome.finite:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        logger.warning(
            f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}: step skipped "
            f"({self.in_a_row} in a row, at most {self.limit})"
        )

    def check(self, step: int) -> None:
        """End a run that skips one step after the other.

        Raises:
            NonFiniteRun: The limit is reached.
        """
        if self.in_a_row >= self.limit:
            raise NonFiniteRun(
                f"step {step}: {self.in_a_row} steps in a row were not finite "
                "(training.max_skipped_steps); the last checkpoint is intact: lower optimizer.lr "
                "or look at attention.recipe and the data"
            )


@dataclass(frozen=True, slots=True)
class _Pending:
    note: Any
    figures: Tensor
    sums: Tensor
    begun: torch.cuda.Event | None
    done: torch.cuda.Event | None


class Outcomes:
    """Steps whose figures are on their way to the host, in order.

    On a GPU a step is read after the next one was queued, so that the device always has work; on a
    CPU at once. Whoever needs the present state (a checkpoint, a validation, the end) drains first.
    """

    def __init__(
        self, device: torch.device, read: Callable[[Any, Outcome], None], *, at_once: bool = False
    ) -> None:
        """Begin with nothing pending.

        Args:
            device: Where the steps run.
            read: Called once per step, in order, with the step's note and its outcome.
            at_once: Wait for the device at every step.
        """
        self._cuda = device.type == "cuda"
        self._delay = 1 if self._cuda and not at_once else 0
        self._read = read
        self._pending: deque[_Pending] = deque()
        self._last_end: torch.cuda.Event | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def begin_step(self) -> None:
        """Start the device's clock, unless it runs on from a step that is still pending."""
        if self._cuda and not self._pending:
            self._last_end = _event()

    def push(self, note: Any, *, loss: Tensor, grad_norm: Tensor, sums: Tensor) -> None:
        """Queue a step's figures, and read those of the step before.

        Args:
            note: Handed back with the outcome.
            loss: Mean loss of the step over all ranks, a scalar.
            grad_norm: Norm of its gradients, a scalar.
            sums: From ``counts.sum_over_ranks``.
        """
        figures = torch.stack([loss.double(), grad_norm.double()])
        if self._cuda:
            figures, sums = (x.to("cpu", non_blocking=True) for x in (figures, sums))
        done = _event() if self._cuda else None
        self._pending.append(_Pending(note, figures, sums, self._last_end, done))
        self._last_end = done
        while len(self._pending) > self._delay:
            self._read_oldest()

    def drain(self) -> None:
        """Read every pending step."""
        while self._pending:
            self._read_oldest()

    def drain_after_failure(self) -> None:
        """Give steps that the device finished their record, whatever state it is in."""
        try:
            self.drain()
        except Exception as error:
            logger.warning(f"the figures of the last steps could not be read: {error}")

    def _read_oldest(self) -> None:
        step = self._pending.popleft()
        time_s = None
        if step.done is not None:
            step.done.synchronize()
            assert step.begun is not None, "begin_step comes before push"
            time_s = step.begun.elapsed_time(step.done) / 1000
        loss, grad_norm = step.figures.tolist()
        counts, stop = read_sums(step.sums)
        finite = bool(torch.isfinite(step.figures).all())
        self._read(step.note, Outcome(loss, grad_norm, finite, counts, stop, time_s))


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
