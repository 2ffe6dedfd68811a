"""Validation on a fixed set: the same rows every round, averaged over tokens."""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.validate import BaseValidator
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.utils import device_type

from titan_lowprec.titan.dataloader import validation_batches_of
from titan_lowprec.titan.loss import IGNORE_INDEX, LossFunction, loss_sum_of_batch
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.metrics import LowprecMetricsProcessor


class LowprecValidator(BaseValidator):
    """Summed loss over summed tokens of the validation documents, over all ranks.

    Every round reads the set from its beginning, and every rank runs the same number of batches:
    where rows run out it runs ignored ones, so no collective is missed.
    """

    def __init__(
        self,
        job_config: MergedJobConfig,
        *,
        rank: int,
        world_size: int,
        parallel_dims: ParallelDims,
        loss_fn: LossFunction,
        metrics_processor: LowprecMetricsProcessor,
    ) -> None:
        super().__init__(job_config)
        self.job_config: MergedJobConfig = job_config
        self.rank, self.world_size = rank, world_size
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        self.metrics_processor = metrics_processor

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Evaluate and record; the model is in training mode before and after."""
        (model,) = model_parts
        model.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        batches = validation_batches_of(self.job_config, rank=self.rank, world_size=self.world_size)
        for inputs, labels in batches:
            on_device = {name: tensor.to(device_type) for name, tensor in inputs.items()}
            loss_sum = loss_sum_of_batch(
                model, self.loss_fn, on_device, labels.to(device_type), self.job_config
            )
            totals += torch.tensor([loss_sum.item(), (labels != IGNORE_INDEX).sum().item()])
        reshard(model)
        model.train()
        loss_sum, tokens = (self._sum_over_ranks(total) for total in totals)
        self.metrics_processor.log_validation_record(step, loss_sum / max(tokens, 1), int(tokens))

    def _sum_over_ranks(self, total: torch.Tensor) -> float:
        if not self.parallel_dims.dp_enabled:
            return total.item()
        return dist_utils.dist_sum(total.to(device_type), self.parallel_dims.get_mesh("batch"))

    def should_validate(self, step: int) -> bool:
        """Every ``validation.freq`` steps, and after the last."""
        last = step == self.job_config.training.steps
        return last or step % self.job_config.validation.freq == 0


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward leaves gathered, so that a checkpoint can follow.

    The root's group of FSDP2 stays unsharded after its forward; its optimizer states could not be
    matched with parameters then.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def build_validator(
    job_config: MergedJobConfig,
    dp_world_size: int,
    dp_rank: int,
    parallel_dims: ParallelDims,
    loss_fn: LossFunction,
    metrics_processor: LowprecMetricsProcessor,
    **kwargs: Any,
) -> LowprecValidator:
    """TorchTitan's component: pipeline and tokenizer arguments are not needed here."""
    del kwargs
    return LowprecValidator(
        job_config,
        rank=dp_rank,
        world_size=dp_world_size,
        parallel_dims=parallel_dims,
        loss_fn=loss_fn,
        metrics_processor=metrics_processor,
    )
