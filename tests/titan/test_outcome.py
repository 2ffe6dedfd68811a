"""The decision about a step is the device's; its figures reach the host once, in order."""

import copy
import warnings

import pytest
import torch

from tests.titan.trainers import running_trainer
from titan_lowprec.titan.counts import StepCounts
from titan_lowprec.titan.outcome import (
    NonFiniteRun,
    Outcome,
    Outcomes,
    SkippedSteps,
    is_finite,
    step_if_finite,
)

SYNCHRONISED = "called a synchronizing CUDA operation"
SUMS = torch.tensor([*range(1, 8), 0])


class Container:
    """Stands for TorchTitan's container of optimizers."""

    def __init__(self, parameters, **options):
        self.optimizers = [torch.optim.AdamW(parameters, lr=0.1, **options)]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def state(container):
    (optimizer,) = container.optimizers
    return copy.deepcopy([optimizer.state[p] for p in optimizer.param_groups[0]["params"]])


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("bad", ["loss", "grad_norm"])
def test_a_step_that_is_not_finite_changes_no_bit_of_parameters_and_optimizer(implementation, bad):
    parameters = [torch.nn.Parameter(torch.randn(7, 5)) for _ in range(2)]
    container = Container(parameters, **{implementation: True})
    figures = {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(2.0)}
    for finite in (True, False, True):
        before = copy.deepcopy(parameters), state(container) if container.optimizers else None
        for p in parameters:
            p.grad = torch.randn_like(p) if finite else torch.full_like(p, torch.nan)
        chosen = figures if finite else {**figures, bad: torch.tensor(torch.inf)}
        step_if_finite(container, is_finite(chosen["loss"], chosen["grad_norm"]))
        for old, new in zip(before[0], parameters, strict=True):
            assert torch.equal(old, new) is not finite
        if not finite:
            for old, new in zip(before[1], state(container), strict=True):
                assert all(torch.equal(old[key], new[key]) for key in old)
    assert all(int(each["step"]) == 2 for each in state(container))


def test_a_fused_step_with_a_decision_equals_one_without_in_every_bit():
    start = torch.randn(64)
    results = []
    for guarded in (False, True):
        parameter = torch.nn.Parameter(start.clone())
        container = Container([parameter], fused=True)
        for seed in range(3):
            parameter.grad = torch.randn(64, generator=torch.Generator().manual_seed(seed))
            if guarded:
                step_if_finite(container, torch.tensor(True))
            else:
                container.step()
        results.append(parameter.detach())
    assert torch.equal(*results)


def outcomes(device, seen):
    return Outcomes(torch.device(device), lambda note, outcome: seen.append((note, outcome)))


def push(pending, step, device, loss=1.5):
    figures = {"loss": loss, "grad_norm": 0.25}
    tensors = {k: torch.tensor(v, device=device) for k, v in figures.items()}
    pending.begin_step()
    pending.push(step, **tensors, sums=SUMS)


def test_on_a_cpu_a_step_is_read_at_once():
    seen = []
    pending = outcomes("cpu", seen)
    push(pending, 1, "cpu")
    ((note, outcome),) = seen
    assert (note, outcome.loss, outcome.grad_norm, outcome.finite) == (1, 1.5, 0.25, True)
    assert outcome.counts == StepCounts(1, 2, 3, 4, 5, 6, 7)
    assert outcome.step_time_s is None and not outcome.stop


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_read_after_the_next_was_queued_and_at_the_end():
    seen = []
    pending = outcomes("cuda", seen)
    for step in (1, 2, 3):
        push(pending, step, "cuda", loss=float(step))
    assert [note for note, _ in seen] == [1, 2]
    pending.drain()
    assert [(note, outcome.loss) for note, outcome in seen] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert all(outcome.step_time_s > 0 for _, outcome in seen)


def test_the_limit_of_skipped_steps_counts_steps_in_a_row():
    skips = SkippedSteps(2)
    for step, finite in enumerate([False, True, False, False]):
        skips.check(step)
        skips.count(step, Outcome(1.0, 1.0, finite, StepCounts(*range(7)), False, None))
    assert (skips.total, skips.in_a_row) == (3, 2)
    with pytest.raises(NonFiniteRun, match="step 3: 2 steps in a row"):
        skips.check(3)


def test_a_failing_read_after_a_failure_hides_nothing():
    def fail(note, outcome):
        raise NonFiniteRun(f"step {note}")

    pending = Outcomes(torch.device("cpu"), fail)
    with pytest.raises(NonFiniteRun, match="step 1"):
        push(pending, 1, "cpu")
    pending.drain_after_failure()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("graph", ["no-enable", "enable"])
def test_a_step_waits_for_the_device_nowhere(tmp_path, graph):
    """CUDA's own count of synchronising calls, over whole steps; log steps included."""
    options = ("--training.steps=9", "--metrics.log_freq=1", f"--graph.{graph}")
    with running_trainer(tmp_path / "run", *options) as trainer:
        iterator = trainer.batch_generator(trainer.dataloader)
        for _ in range(4):
            trainer._one_step(iterator)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(4):
                    trainer._one_step(iterator)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert [w for w in caught if SYNCHRONISED in str(w.message)] == []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            torch.ones(1, device="cuda").item()
            torch.cuda.set_sync_debug_mode("default")
        assert any(SYNCHRONISED in str(w.message) for w in caught), "the count does not count"
        trainer.outcomes.drain()
