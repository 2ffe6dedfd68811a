"""Time and peak memory of the parts of a draft's steps, taken inside steps of the real trainer."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.train import Trainer

from titan_lowprec.models.dflash import model as draft_model
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.titan.dflash import objective as objective_module
from titan_lowprec.titan.dflash.batch import anchors_of
from titan_lowprec.titan.dflash.part_clock import (
    ATTENTION,
    BACKWARD,
    DATA,
    DRAFT,
    FORWARD,
    HEAD,
    MASK,
    STEP,
    TARGET,
    UPDATE,
    Part,
    PartClock,
)
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.metrics_file import read_metrics
from titan_lowprec.titan.trainer import make_trainer

Tensor = torch.Tensor


@dataclass(frozen=True)
class StepTimes:
    """A finished measurement."""

    steps: int
    """Counted steps; the first ones are not."""
    step_ms: tuple[float, ...]
    losses: tuple[float, ...]
    """Of every step."""
    parts: tuple[Part, ...]
    visible: float
    """Share of the keys that a used query sees, of one more batch."""

    def as_json(self) -> dict[str, Any]:
        """For a line of JSON."""
        ordered = sorted(self.step_ms)
        spread = {
            "step_ms_median": statistics.median(ordered),
            "step_ms_10_percent": ordered[len(ordered) // 10],
            "step_ms_90_percent": ordered[(9 * len(ordered)) // 10],
        }
        return asdict(self) | spread


class _Mark(torch.autograd.Function):
    """The identity; calls back when all gradients of its tensors have arrived."""

    @staticmethod
    def forward(ctx: Any, arrived: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.arrived = arrived
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.arrived()
        return (None, *gradients)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def watching(trainer: Any, clock: PartClock) -> Iterator[None]:
    """Mark the parts of a trainer's steps; the numbers that it computes stay the same."""
    objective, model = trainer.loss_fn, trainer.model_parts[0]
    attend, lose, build = (
        draft_model.draft_attention,
        objective_module.draft_loss,
        objective_module.build_mask,
    )
    features, run = objective.features, trainer.forward_backward_step
    memory = trainer.metrics_processor.take_memory
    section = trainer.job_config.compile
    compiled = section.enable and "model" in section.components

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        q, k, v = _Mark.apply(lambda: clock.end(ATTENTION + BACKWARD), q, k, v)  # pyright: ignore
        with _inside(clock, ATTENTION + FORWARD):
            out = attend(q, k, v, **options)
        return _Mark.apply(lambda: clock.begin(ATTENTION + BACKWARD), out)[0]  # pyright: ignore

    def head_is_done() -> None:
        clock.end(HEAD + BACKWARD)
        clock.begin(DRAFT + BACKWARD)

    def loss(hidden_BTE: Tensor, *args: Any, **options: Any) -> Any:
        (hidden_BTE,) = _Mark.apply(head_is_done, hidden_BTE)  # pyright: ignore
        with _inside(clock, HEAD + FORWARD):
            found = lose(hidden_BTE, *args, **options)
        (loss_sum,) = _Mark.apply(lambda: clock.begin(HEAD + BACKWARD), found.loss_sum)  # pyright: ignore
        return replace(found, loss_sum=loss_sum)

    def microbatch(**options: Any) -> Tensor:
        # a step's first microbatch ends the preparation; a later one interrupts the update
        clock.end(DATA if clock.is_open(DATA) else UPDATE)
        out = run(**options)
        clock.end(DRAFT + BACKWARD)
        clock.begin(UPDATE)
        return out

    def take_memory() -> Any:
        clock.sample()  # the trainer begins a new peak here
        return memory()

    hooks = (
        model.register_forward_pre_hook(lambda *_: clock.begin(DRAFT + FORWARD), prepend=True),
        model.register_forward_hook(lambda *_: clock.end(DRAFT + FORWARD)),
    )
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        if not compiled:  # a compiled layer is one part
            stack.enter_context(_replaced(draft_model, "draft_attention", attention))
        for owner, name, value in (
            (objective_module, "draft_loss", loss),
            (objective_module, "build_mask", _timed(clock, MASK, build)),
            (objective, "features", _timed(clock, TARGET, features)),
            (trainer, "forward_backward_step", microbatch),
            (trainer.metrics_processor, "take_memory", take_memory),
        ):
            stack.enter_context(_replaced(owner, name, value))
        yield


@contextmanager
def _inside(clock: PartClock, name: str) -> Iterator[None]:
    clock.begin(name)
    yield
    clock.end(name)


def _timed(clock: PartClock, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        with _inside(clock, name):
            return function(*args, **options)

    return timed


def time_steps(
    job_config: MergedJobConfig, *, steps: int, warmup: int, seconds: float
) -> StepTimes:
    """Train a recipe for some steps and say where their time and memory went.

    Args:
        job_config: Of a draft; checkpoints and validation are switched off in it.
        steps: Optimizer steps to count.
        warmup: Optimizer steps before them, in which kernels are compiled.
        seconds: No step begins later than that after the call; fewer are counted then.

    Raises:
        ValueError: The recipe is none of a draft, or replays a graph, whose parts are one.
    """
    if job_config.model.name != "dflash" or job_config.graph.enable:
        raise ValueError(
            "time_steps: needs a recipe with model.name = dflash and graph.enable = false, got "
            f"{job_config.model.name} and {job_config.graph.enable}; choose another recipe"
        )
    limit = time.perf_counter() + seconds
    job_config.checkpoint.enable = job_config.validation.enable = False
    trainer = make_trainer(Trainer)(job_config)
    try:
        trainer.metrics_processor.resume_at(0)
        clock = PartClock(trainer.device)
        with watching(trainer, clock):
            data = trainer.batch_generator(trainer.dataloader)
            while trainer.step < warmup + steps and time.perf_counter() < limit:
                if trainer.step == warmup:
                    clock.forget()
                trainer.step += 1
                clock.begin_step()
                clock.begin(DATA)
                trainer.train_step(data)
                clock.end(UPDATE)
                clock.end(STEP)
            trainer.outcomes.drain()
        records = read_metrics(Path(job_config.job.dump_folder) / "metrics.jsonl")
        losses = tuple(record["loss"] for record in records if record["kind"] == "train")
        counted = len(clock.steps)
        inputs, _ = next(data)
        mask = DraftMask(
            anchors_of(inputs), inputs["document_ids"], trainer.loss_fn.draft.block_tokens
        )
        return StepTimes(counted, clock.step_ms(), losses, clock.parts(), mask.visible_share())
    finally:
        trainer.close()
