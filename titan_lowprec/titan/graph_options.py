"""The ``[graph]`` section as what runs a microbatch."""

from typing import Any

import torch

from titan_lowprec.titan.check_config import ConfigError
from titan_lowprec.titan.graph import EagerMicrobatch, MicrobatchGraph, Tensor
from titan_lowprec.titan.loss import BatchLoss

EAGER_STEPS = 2
"""Optimizer steps before a capture: gradients, optimizer states and compiled code exist then."""


def build_microbatch(trainer: Any) -> EagerMicrobatch | MicrobatchGraph:
    """What a trainer's step calls for forward and backward of a microbatch.

    Args:
        trainer: With the attributes of TorchTitan's, after its constructor.

    Raises:
        ConfigError: ``graph.enable`` is set and this machine's attention cannot be captured.
    """
    section = trainer.job_config.graph

    def run(inputs: dict[str, Tensor], labels: Tensor, denominator: Tensor) -> Tensor:
        return trainer.forward_backward_step(
            input_dict=inputs, labels=labels, global_valid_tokens=denominator
        )

    if not section.enable:
        return EagerMicrobatch(run, trainer.device)
    loss_fn = trainer.loss_fn
    if isinstance(loss_fn, BatchLoss) and (obstacle := loss_fn.obstacle_to_capture()):
        raise ConfigError(f"graph.enable: must be false: {obstacle}, got true; set it to false")
    plan = getattr(trainer.model_args, "attention", None)
    if getattr(plan, "impl", "triton") != "triton":
        raise ConfigError(
            "graph.enable: must be false where attention runs as its PyTorch reference, which "
            f"reads document offsets on the host, got attention.recipe="
            f"{trainer.job_config.attention.recipe!r}; set it to false, or choose a recipe and a "
            "GPU that the kernels support"
        )
    return MicrobatchGraph(
        run,
        parameters=trainer.model_parts[0].parameters(),
        warmup=EAGER_STEPS * trainer.gradient_accumulation_steps,
        max_documents=section.max_documents or trainer.job_config.data.max_documents,
        over_capacity=section.over_capacity,
        overwrites=trainer.gradient_accumulation_steps == 1,
        device=trainer.device,
    )


def separate_states(optimizers: Any, device: torch.device) -> None:
    """Before the first step of an optimizer, return freed memory to the device.

    States made from it would sit among blocks of activations for good, and what is left of those
    blocks could be used by no graph.
    """
    if device.type == "cuda" and not all(optimizer.state for optimizer in optimizers.optimizers):
        torch.cuda.empty_cache()


def hooks_are_due(trainer: Any) -> bool:
    """Whether something looks into the model in this step: a replay would not run it."""
    if isinstance(trainer.loss_fn, BatchLoss) and trainer.loss_fn.measuring:
        return True
    every = trainer.metrics_processor.health.every
    return every > 0 and trainer.step % every == 0
