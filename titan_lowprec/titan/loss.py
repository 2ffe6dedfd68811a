"""TorchTitan's loss component, and the one way from a batch to its summed loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from titan_lowprec.ops.cross_entropy.api import cross_entropy
from titan_lowprec.shapes import Float, Int, Tensor
from titan_lowprec.titan.merged_config import MergedJobConfig

IGNORE_INDEX = -100
LossFunction = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[dict[str, Tensor], Tensor]


class BatchLoss(ABC):
    """A loss that is no function of logits and labels; ``build_loss_fn`` may return one."""

    measuring = False
    """Whether the microbatches of the current step do more than a replayed graph would repeat."""

    def obstacle_to_capture(self) -> str | None:
        """Why a CUDA graph cannot hold `loss_sum` on this machine; ``None`` where it can."""
        return None

    @abstractmethod
    def loss_sum(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        """Summed loss of one microbatch, on the device."""

    @abstractmethod
    def step_denominator(self, microbatches: list[Batch], device: torch.device) -> Tensor:
        """What divides the sum: a fp32 scalar, over all ranks, from microbatches on the host."""

    def __call__(self, pred: Tensor, labels: Tensor) -> Tensor:
        """TorchTitan's form, which has too little to go by."""
        raise RuntimeError(f"{type(self).__name__}: the loss is computed from whole batches")


def step_denominator(
    loss_fn: LossFunction, microbatches: list[Batch], valid_tokens: Float[Tensor, ""]
) -> Tensor:
    """What divides a step's summed loss on every rank: its valid tokens, or the loss's own."""
    if isinstance(loss_fn, BatchLoss):
        return loss_fn.step_denominator(microbatches, valid_tokens.device)
    return valid_tokens


def build_loss(job_config: MergedJobConfig, **kwargs: Any) -> LossFunction:
    """The ``[loss]`` section as a function of logits and labels that returns the fp32 sum.

    The trainer divides by the number of valid labels of the whole step. ``linear_chunked`` has no
    logits and runs inside the model's head; the function returned for it refuses to be called.
    """
    del kwargs
    section = job_config.loss

    def logits_fp32(pred: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]) -> Tensor:
        loss_sum, _, _ = cross_entropy(
            pred.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            z_loss=section.z_loss,
            softcap=section.softcap or None,
        )
        return loss_sum

    def logits_bf16(pred: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]) -> Tensor:
        """What training did before: log-softmax and per-token loss stored in bf16."""
        return torch.nn.functional.cross_entropy(
            pred.flatten(0, 1).bfloat16(),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        ).sum(dtype=torch.float32)

    def linear_chunked(pred: Tensor, labels: Tensor) -> Tensor:
        raise RuntimeError("loss.impl=linear_chunked: the loss is computed in the model's head")

    functions = {
        "logits_fp32": logits_fp32,
        "logits_bf16": logits_bf16,
        "linear_chunked": linear_chunked,
    }
    return functions[section.impl]


def loss_sum_of_batch(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: dict[str, Tensor],
    labels: Int[Tensor, "B T"],
    job_config: MergedJobConfig,
) -> Tensor:
    """Forward pass and summed loss of one microbatch; training and validation share it."""
    if isinstance(loss_fn, BatchLoss):
        return loss_fn.loss_sum(model, inputs, labels)
    extra = {name: tensor for name, tensor in inputs.items() if name != "input"}
    if job_config.loss.impl == "linear_chunked":
        return model(inputs["input"], labels=labels, **extra)
    return loss_fn(model(inputs["input"], **extra), labels)
