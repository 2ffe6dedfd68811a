"""Metrics of draft training: acceptance beside the loss, and FLOPs of target and draft."""

from typing import Any

import torch
from torchtitan.components.metrics import DeviceMemStats
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs
from torchtitan.tools.utils import device_type

from titan_lowprec.titan.dflash.flops import DraftWork, draft_step_flops
from titan_lowprec.titan.dflash.objective import DraftObjective
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.metrics import LowprecMetricsProcessor, StepRecord

PER_SLOT = "slot_accuracy"


class DraftMetricsProcessor(LowprecMetricsProcessor):
    """Adds ``loss_denominator``, ``anchors``, ``draft_labels`` and acceptance to every line."""

    objective: DraftObjective
    """The trainer's loss; it attaches it once both exist."""

    def attach_loss(self, loss_fn: Any) -> None:
        """Take figures from the trainer's loss."""
        assert isinstance(loss_fn, DraftObjective)
        self.objective = loss_fn
        self._draft_figures: dict[str, Any] = {}

    def resume_at(self, step: int) -> None:
        """Continue after a checkpoint of ``step``."""
        self.objective.step = step
        super().resume_at(step)

    def log_step(
        self,
        record: StepRecord,
        *,
        memory: DeviceMemStats | None = None,
        step_time_s: float | None = None,
    ) -> None:
        """Log one optimizer step; figures are summed over ranks first, so every rank calls it."""
        self._draft_figures = self.objective.take_figures(torch.device(device_type))
        super().log_step(record, memory=memory, step_time_s=step_time_s)

    def _train_line(self, record: StepRecord, step_time_s: float) -> dict[str, Any]:
        return super()._train_line(record, step_time_s) | self._draft_figures

    def _scalars(self, record: StepRecord, line: dict[str, Any]) -> dict[str, float]:
        scalars = super()._scalars(record, line)
        return scalars | dashboard_scalars(self._draft_figures, "draft")

    def _step_flops(self, record: StepRecord) -> int:
        target = self.objective.target
        parameters, attention = 0, 0
        if target is not None:
            layers = list(target.module.model.layers.values())[: max(target.taps) + 1]
            parameters = sum(p.numel() for layer in layers for p in layer.parameters())
            shape = self.objective.args.target
            attention = len(layers) * shape.n_heads * shape.head_dim
        slots = record.rows * self.job_config.training.seq_len
        work = DraftWork(
            tokens=slots - record.padding_tokens,
            attention_pairs=record.attention_pairs,
            anchors=self._draft_figures["anchors"],
            target_parameters=parameters,
            target_attention=attention,
        )
        return draft_step_flops(self.objective.draft, work)


def dashboard_scalars(figures: dict[str, Any], prefix: str) -> dict[str, float]:
    """Figures as scalars of a dashboard; accuracy gets a name for each slot."""
    scalars = {f"{prefix}/{name}": float(v) for name, v in figures.items() if name != PER_SLOT}
    for slot, value in enumerate(figures.get(PER_SLOT, []), start=1):
        if value is not None:
            scalars[f"{prefix}/accuracy_slot_{slot}"] = value
    return scalars


def build_draft_metrics(
    job_config: MergedJobConfig, parallel_dims: ParallelDims, model_args: BaseModelArgs
) -> DraftMetricsProcessor:
    """The ``build_metrics_processor_fn`` of the train spec."""
    return DraftMetricsProcessor(job_config, parallel_dims, model_args)
