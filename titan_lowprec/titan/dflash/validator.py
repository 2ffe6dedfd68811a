"""Validation of a draft: loss over weights, and acceptance, with fixed anchors."""

from typing import Any

import torch
import torch.nn as nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import device_type

from titan_lowprec.titan.dflash.loader import draft_validation_batches
from titan_lowprec.titan.dflash.objective import (
    DraftObjective,
    acceptance_figures,
    sum_over_ranks,
)
from titan_lowprec.titan.loss import LossFunction
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.metrics import LowprecMetricsProcessor
from titan_lowprec.titan.validator import LowprecValidator, reshard


class DraftValidator(LowprecValidator):
    """Summed loss over summed weights of the validation set, over all ranks."""

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Evaluate and record; the model is in training mode before and after."""
        (model,) = model_parts
        objective: Any = self.loss_fn
        assert isinstance(objective, DraftObjective)
        model.eval()
        totals = torch.zeros(4, dtype=torch.float64)
        objective.measuring, objective.acceptance = True, None
        for inputs, labels in draft_validation_batches(
            self.job_config, rank=self.rank, world_size=self.world_size
        ):
            weights = objective.batch_weights(inputs)
            on_device = {name: tensor.to(device_type) for name, tensor in inputs.items()}
            loss_sum = objective.loss_sum(model, on_device, labels)
            totals += torch.cat([loss_sum.double().cpu()[None], weights])
        reshard(model)
        model.train()
        objective.measuring = False
        device = torch.device(device_type)
        loss_sum, weight, _, tokens = sum_over_ranks(totals.to(device)).tolist()
        figures = acceptance_figures(objective.take_acceptance(device))
        self.metrics_processor.log_validation_record(
            step, loss_sum / (weight or 1.0), int(tokens), figures
        )


def build_draft_validator(
    job_config: MergedJobConfig,
    dp_world_size: int,
    dp_rank: int,
    parallel_dims: ParallelDims,
    loss_fn: LossFunction,
    metrics_processor: LowprecMetricsProcessor,
    **kwargs: Any,
) -> DraftValidator:
    """TorchTitan's component: pipeline and tokenizer arguments are not needed here."""
    del kwargs
    return DraftValidator(
        job_config,
        rank=dp_rank,
        world_size=dp_world_size,
        parallel_dims=parallel_dims,
        loss_fn=loss_fn,
        metrics_processor=metrics_processor,
    )
