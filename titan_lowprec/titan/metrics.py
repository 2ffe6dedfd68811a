"""Metrics of a run: ``metrics.jsonl`` every step; console, TensorBoard and wandb at log steps."""

import datetime
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_lowprec.titan.flops import matmul_parameters, peak_of, training_flops
from titan_lowprec.titan.health import HealthProbe
from titan_lowprec.titan.memory_monitor import build_memory_monitor
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.metrics_file import MetricsFile, read_metrics
from titan_lowprec.titan.step_record import StepRecord
from titan_lowprec.titan.trackers import Tracker, build_trackers

__all__ = ["LowprecMetricsProcessor", "StepRecord", "build_metrics_processor", "read_metrics"]


class LowprecMetricsProcessor(MetricsProcessor):
    """TorchTitan's processor with document-aware throughput, on any device.

    The stock constructor needs an accelerator and survives a wandb that did not start, so it is
    not called; every attribute that the stock trainer uses is set here. Rank 0 logs.
    """

    def __init__(
        self, job_config: MergedJobConfig, parallel_dims: ParallelDims, model_args: BaseModelArgs
    ) -> None:
        self.job_config = job_config
        self.parallel_dims = parallel_dims
        self.model_args = model_args
        self.device_memory_monitor = build_memory_monitor(utils.device_type)  # pyright: ignore
        no_color = job_config.metrics.disable_color_printing
        self.color = utils.NoColor() if no_color else utils.Color()
        self.peak = peak_of(self.device_memory_monitor.device_name)
        self.num_flops_per_token = -1
        self.ntokens_since_last_log = 0
        self.data_loading_times = []
        self.optimizers = None
        self.lr_schedulers = None
        self.model_parts = None
        self.health = HealthProbe(self, every=job_config.metrics.health_every)
        self._matmul_parameters = 0
        self._memory = self.device_memory_monitor.get_peak_stats()
        self._first: tuple[int, float] | None = None
        self._seen = (0, 0)
        """The last recorded step, and the valid tokens seen with it."""
        self._begun = time.perf_counter()
        self._file: MetricsFile | None = None
        self._trackers: list[Tracker] = []
        if rank() == 0:
            self._file = MetricsFile(Path(job_config.job.dump_folder))
            self._trackers = build_trackers(job_config)
            if self.peak is None:
                logger.warning(
                    f"MFU is not reported: no peak rate is known for "
                    f"{self.device_memory_monitor.device_name!r} (titan/flops.py has the table)"
                )

    def should_log(self, step: int) -> bool:
        """Whether a step is shown on the console and mirrored: 1, every ``log_freq``, the last."""
        frequency = self.job_config.metrics.log_freq
        return step == 1 or step % frequency == 0 or step == self.job_config.training.steps

    def attach_loss(self, loss_fn: Any) -> None:
        """Know the trainer's loss, for figures that only it has; here there are none."""

    def begin_step(self) -> None:
        """Start the clock of the next step, which otherwise starts at the end of the last one."""
        self._begun = time.perf_counter()

    def resume_at(self, step: int) -> None:
        """Continue after a checkpoint of ``step``; later lines of earlier attempts lapse."""
        if self._file is not None:
            self._file.resume_at(step)
        self.begin_step()

    def take_memory(self) -> DeviceMemStats:
        """Peak memory since the last call; taken when a step is queued, before it is logged."""
        self._memory = self.device_memory_monitor.get_peak_stats()
        self.device_memory_monitor.reset_peak_stats()
        return self._memory

    def log_step(
        self,
        record: StepRecord,
        *,
        memory: DeviceMemStats | None = None,
        step_time_s: float | None = None,
    ) -> None:
        """Log one optimizer step. Every rank calls it at every step; rank 0 writes.

        Args:
            record: The step's figures; rank 0's are written.
            memory: From ``take_memory``; ``None`` takes it now.
            step_time_s: The device's time for the step; ``None`` is the host's since
                ``begin_step`` or the last record.
        """
        now = time.perf_counter()
        if step_time_s is None:
            step_time_s = now - self._begun
        self._memory = self.take_memory() if memory is None else memory
        health = self.health.take(record.step)
        self._seen = (record.step, record.valid_tokens_seen)
        if self._first is None:
            self._first = (record.step, now)
        if self._file is not None:
            line = {**self._train_line(record, step_time_s), **health}
            self._file.append(line)
            if self.should_log(record.step):
                self._print(line, now)
                health |= self._scalars(record, line)
            if health:
                self._mirror(health, record.step)
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.begin_step()

    def log_validation_record(
        self, step: int, loss: float, tokens: int, figures: dict[str, Any] | None = None
    ) -> None:
        """Log a validation round after ``step``; its time counts for no training step.

        Args:
            step: Optimizer steps done.
            loss: Mean over all valid tokens of the round.
            tokens: Valid tokens evaluated, over all ranks.
            figures: What else the round measured, for ``metrics.jsonl``.
        """
        if self._file is not None:
            line = {"kind": "validation", "step": step, "loss": loss, "tokens": tokens}
            self._file.append({**line, **(figures or {}), "time": time.time()})
            scalars = {"validation_metrics/loss": loss, "validation_metrics/tokens": tokens}
            if self._seen[0] == step:
                scalars["valid_tokens_seen"] = self._seen[1]  # a dashboard's abscissa
            self._mirror(scalars, step)
            color = self.color
            logger.info(
                f"{color.yellow}validate step: {step:2}  {color.green}loss: {loss:8.5f}  "
                f"{color.blue}tokens: {tokens:,}{color.reset}"
            )
        self.device_memory_monitor.reset_peak_stats()
        self.begin_step()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Stock entry point; it has no figures on documents and would report a wrong MFU."""
        raise NotImplementedError(
            "metrics.log: the trainer must log a StepRecord, got a call of TorchTitan's log(); "
            "call log_step"
        )

    def log_validation(self, *args: Any, **kwargs: Any) -> None:
        """Stock entry point; it does not know how many tokens the loss is the mean of."""
        raise NotImplementedError(
            "metrics.log_validation: the validator must report its tokens, got a call of "
            "TorchTitan's log_validation(); call log_validation_record"
        )

    def close(self) -> None:
        """Flush and close every output."""
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._file is not None:
            self._file.close()

    def _train_line(self, record: StepRecord, step_time_s: float) -> dict[str, Any]:
        """The line of ``metrics.jsonl``."""
        memory = self._memory
        flops_per_s = self._step_flops(record) / step_time_s
        mfu = None
        if self.peak is not None:
            mfu = flops_per_s / (self.peak.flops_per_s * self.parallel_dims.world_size)
        slots = record.rows * self.job_config.training.seq_len
        return {
            "kind": "train",
            **asdict(record),
            "step_time_s": step_time_s,
            "valid_tokens_per_s": record.valid_tokens / step_time_s,
            "tflops_per_device": flops_per_s / self.parallel_dims.world_size / 1e12,
            "mfu": mfu,
            "peak_name": self.peak.name if self.peak else None,
            "memory_gib": memory.max_reserved_gib,
            "memory_active_gib": memory.max_active_gib,
            "documents_per_row": record.documents / record.rows,
            "padding_fraction": record.padding_tokens / slots,
            "time": time.time(),
        }

    def _step_flops(self, record: StepRecord) -> int:
        """Useful FLOPs of the step on all devices."""
        if self._matmul_parameters == 0:
            assert self.model_parts is not None, "the trainer sets model_parts before training"
            self._matmul_parameters = matmul_parameters(self.model_parts)
        args: Any = self.model_args
        tokens = record.rows * self.job_config.training.seq_len - record.padding_tokens
        return training_flops(
            matmul_parameters=self._matmul_parameters,
            tokens=tokens,
            attention_pairs=record.attention_pairs,
            n_heads=args.n_heads,
            head_dim=args.head_dim,
            n_layers=args.n_layers,
        )

    def _scalars(self, record: StepRecord, line: dict[str, Any]) -> dict[str, float]:
        """TorchTitan's names where it has one, for dashboards made for it."""
        memory = self._memory
        tokens = record.rows * self.job_config.training.seq_len
        step_time_s = line["step_time_s"]
        scalars = {
            "loss_metrics/global_avg_loss": record.loss,
            "grad_norm": record.grad_norm,
            "lr": record.lr,
            "n_tokens_seen": record.tokens_seen,
            "valid_tokens_seen": record.valid_tokens_seen,
            "throughput(tps)": tokens / step_time_s / self.parallel_dims.world_size,
            "throughput/valid_tokens_per_s": line["valid_tokens_per_s"],
            "tflops": line["tflops_per_device"],
            "time_metrics/end_to_end(s)": step_time_s,
            "time_metrics/data_loading(s)": record.data_wait_s,
            "time_metrics/data_loading(%)": 100 * record.data_wait_s / step_time_s,
            "memory/max_active(GiB)": memory.max_active_gib,
            "memory/max_active(%)": memory.max_active_pct,
            "memory/max_reserved(GiB)": memory.max_reserved_gib,
            "memory/max_reserved(%)": memory.max_reserved_pct,
            "memory/num_alloc_retries": memory.num_alloc_retries,
            "memory/num_ooms": memory.num_ooms,
            "data/documents_per_row": line["documents_per_row"],
            "data/padding_fraction": line["padding_fraction"],
            "skipped_steps": record.skipped_steps,
            "graph/replays": record.graph_replays,
            "graph/over_capacity": record.graph_over_capacity,
        }
        if line["mfu"] is not None:
            scalars["mfu(%)"] = 100 * line["mfu"]
        return scalars

    def _mirror(self, scalars: dict[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(scalars, step)

    def _print(self, line: dict[str, Any], now: float) -> None:
        color = self.color
        mfu = "N/A" if line["mfu"] is None else f"{100 * line['mfu']:.2f}% of {line['peak_name']}"
        logger.info(
            f"{color.red}step: {line['step']:2}  {color.green}loss: {line['loss']:8.5f}  "
            f"{color.orange}grad_norm: {line['grad_norm']:7.4f}  "
            f"{color.yellow}lr: {line['lr']:.3e}  "
            f"{color.blue}valid tokens/s: {line['valid_tokens_per_s']:,.0f}  "
            f"{color.turquoise}memory: {line['memory_gib']:.2f}GiB  "
            f"{color.magenta}mfu: {mfu}  {color.cyan}eta: {self._eta(line['step'], now)}"
            f"{color.reset}"
        )

    def _eta(self, step: int, now: float) -> str:
        """Time to the last step at the pace since this attempt's first, all pauses included."""
        assert self._first is not None
        first_step, first_time = self._first
        if step == first_step:
            return "unknown"
        left_s = (self.job_config.training.steps - step) * (now - first_time) / (step - first_step)
        return str(datetime.timedelta(seconds=round(left_s)))


def build_metrics_processor(
    job_config: MergedJobConfig, parallel_dims: ParallelDims, model_args: BaseModelArgs
) -> LowprecMetricsProcessor:
    """The ``build_metrics_processor_fn`` of our ``TrainSpec``.

    Args:
        job_config: Merged configuration with our ``[metrics]`` fields.
        parallel_dims: Mesh sizes; throughput per device divides by its world size.
        model_args: Arguments with ``n_layers``, ``n_heads`` and ``head_dim``.
    """
    return LowprecMetricsProcessor(job_config, parallel_dims, model_args)


def rank() -> int:
    """This process's rank, 0 without a process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
