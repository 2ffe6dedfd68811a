"""The trainer: TorchTitan's, with a training loop that loses nothing.

What differs from stock 0.2.2: labels and metadata per document, one global count per step, steps
with non-finite values skipped, one metrics record per step, a refusal to resume another run,
checkpoints on SIGTERM, and an error status when the data ends early.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.tools.logging import logger
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.tools.utils import device_type
from torchtitan.train import Trainer

from titan_lowprec.data.loader import PackedLoader
from titan_lowprec.titan.check_config import check_config, launched_world_size
from titan_lowprec.titan.clipping import clip
from titan_lowprec.titan.counts import (
    StepCounts,
    loss_denominator,
    reads_rows_first,
    sum_over_ranks,
)
from titan_lowprec.titan.graph_options import build_microbatch, hooks_are_due, separate_states
from titan_lowprec.titan.loss import BatchLoss, loss_sum_of_batch, step_denominator
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.metrics import LowprecMetricsProcessor
from titan_lowprec.titan.outcome import (
    Outcome,
    Outcomes,
    SkippedSteps,
    is_finite,
    loss_over_ranks,
    step_if_finite,
)
from titan_lowprec.titan.resume import check_resume, run_identity, save_identity
from titan_lowprec.titan.run_record import save_run_record
from titan_lowprec.titan.step_record import StepNote, StepRecord
from titan_lowprec.titan.timeouts import shorten_timeouts

SIGTERM_STATUS = 128 + signal.SIGTERM
_Stock = Trainer if TYPE_CHECKING else object
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class DataExhausted(RuntimeError):
    """The data ended before ``training.steps`` and ``data.repeat`` is off."""


class LowprecTrainer(_Stock):
    """Mixin over a TorchTitan 0.2.2 ``Trainer``; ``make_trainer`` joins the two."""

    job_config: MergedJobConfig
    dataloader: PackedLoader
    metrics_processor: LowprecMetricsProcessor

    def __init__(self, job_config: MergedJobConfig) -> None:
        world_size = launched_world_size()
        check_config(job_config, device_type=device_type, world_size=world_size)
        if device_type == "cpu":
            job_config.comm.trace_buf_size = 0  # the flight recorder belongs to NCCL
        self.skips = SkippedSteps(job_config.training.max_skipped_steps)
        self.valid_tokens_seen = 0
        self.stop_wanted = False  # this process got a signal
        self.stop_requested = False  # every process knows that one of them did
        self.saved_step = -1
        super().__init__(job_config)
        self.metrics_processor.attach_loss(self.loss_fn)
        # such a loss hands its own figures to the metrics, a step at a time
        at_once = isinstance(self.loss_fn, BatchLoss)
        self.outcomes = Outcomes(self.device, self._read, at_once=at_once)
        self.microbatch = build_microbatch(self)
        self.maybe_enable_amp = contextlib.nullcontext()  # FSDP2 casts on every mesh
        self.identity = run_identity(job_config, global_batch_size=self._global_batch_size())
        if dist.get_rank() == 0:
            save_run_record(
                job_config, dump_folder=job_config.job.dump_folder, world_size=world_size
            )

    def _global_batch_size(self) -> int:
        training, dims = self.job_config.training, self.parallel_dims
        if training.global_batch_size > 0:
            return training.global_batch_size
        return training.local_batch_size * dims.dp_replicate * dims.dp_shard

    # ---- state in checkpoints -------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "valid_tokens_seen": self.valid_tokens_seen,
            "skipped_steps": self.skips.total,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.valid_tokens_seen = state_dict["valid_tokens_seen"]
        self.skips.total = state_dict["skipped_steps"]

    # ---- one step -------------------------------------------------------------------------

    def batch_generator(self, data_iterable: Any) -> Iterator[Batch]:
        """Yield batches; a step that finds too little data is cancelled as a whole."""
        iterator = iter(data_iterable)
        while True:
            begin = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration as end:
                raise DataloaderExhaustedError from end
            self.data_wait_s += time.perf_counter() - begin
            yield batch

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Loss of one microbatch over the step's valid tokens; gradients accumulate."""
        with self.train_context(), self.metrics_processor.health.watching(self.step):
            loss_sum = loss_sum_of_batch(
                self.model_parts[0], self.loss_fn, input_dict, labels, self.job_config
            )
            loss = loss_sum / global_valid_tokens
            loss.backward()
        return loss.detach()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Queue one optimizer step, or its cancellation if it is not finite; the host reads later.

        Nothing here waits for the device, save for an optimizer that is not fused.
        """
        if not self.outcomes:
            self.metrics_processor.begin_step()
        self.outcomes.begin_step()
        self.microbatch.clear_gradients(self.optimizers)
        lr = float(self.lr_schedulers.schedulers[0].get_last_lr()[0])
        self.data_wait_s = 0.0
        microbatches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        sums = sum_over_ranks(
            StepCounts.of(microbatches),
            stop=self.stop_wanted,
            contributes=reads_rows_first(self.parallel_dims),
            device=self.device,
        )
        denominator = step_denominator(
            self.loss_fn, microbatches, loss_denominator(sums, device=self.device)
        )
        losses = [
            self.microbatch(inputs, labels, denominator, eager=hooks_are_due(self))
            for inputs, labels in microbatches
        ]
        training = self.job_config.training
        grad_norm, scale = clip(self.model_parts, training.max_norm, where=training.clip_where)
        loss = loss_over_ranks(torch.stack(losses).sum(), self.parallel_dims)
        self.checkpointer.maybe_wait_for_staging()
        separate_states(self.optimizers, self.device)
        step_if_finite(self.optimizers, is_finite(loss, grad_norm), grad_scale=scale)
        self.lr_schedulers.step()
        note = StepNote(
            step=self.step,
            lr=lr,
            data_wait_s=self.data_wait_s,
            memory=self.metrics_processor.take_memory(),
            graph_replays=self.microbatch.replays,
            graph_over_capacity=self.microbatch.over_capacity,
        )
        self.outcomes.push(note, loss=loss, grad_norm=grad_norm, sums=sums)

    def _read(self, note: StepNote, outcome: Outcome) -> None:
        """Count and record a finished step; stop a run that went astray."""
        self.skips.count(note.step, outcome)
        self.ntokens_seen += outcome.counts.tokens
        self.valid_tokens_seen += outcome.counts.valid_tokens
        self.stop_requested |= outcome.stop
        record = StepRecord.of(
            note,
            outcome,
            tokens_seen=self.ntokens_seen,
            valid_tokens_seen=self.valid_tokens_seen,
            skipped_steps=self.skips.total,
        )
        self.metrics_processor.log_step(record, memory=note.memory, step_time_s=outcome.step_time_s)
        self.skips.check(note.step)

    # ---- the loop -------------------------------------------------------------------------

    def train(self) -> None:
        """Train to ``training.steps``; every way out leaves a checkpoint that can be resumed."""
        self._resume()
        before = signal.signal(signal.SIGTERM, self._on_sigterm)
        profiling = {
            "profiling_config": self.job_config.profiling,
            "global_step": self.step,
            "base_folder": self.job_config.job.dump_folder,
        }
        with (
            maybe_enable_profiling(**profiling) as profiler,
            maybe_enable_memory_snapshot(**profiling) as memory_profiler,
        ):
            try:
                self._all_steps([p for p in (profiler, memory_profiler) if p])
            except BaseException:
                self.outcomes.drain_after_failure()
                raise
            finally:
                signal.signal(signal.SIGTERM, before)
        logger.info("Training completed")

    def _all_steps(self, profilers: list[Any]) -> None:
        data_iterator = self.batch_generator(self.dataloader)
        while self.should_continue_training():
            self._one_step(data_iterator)
            for profiler in profilers:
                profiler.step()
            if self.stop_requested:
                self._stop_on_signal()
        self.outcomes.drain()

    def _resume(self) -> None:
        load_step = self.job_config.checkpoint.load_step
        if self.checkpointer.enable and load_step == -1:
            load_step = self.checkpointer._find_load_step()
        check_resume(self.job_config, self.identity, load_step=load_step)
        self.checkpointer.load(step=self.job_config.checkpoint.load_step)
        self.metrics_processor.resume_at(self.step)
        logger.info(f"Training starts at step {self.step + 1}")

    def _one_step(self, data_iterator: Iterator[Batch]) -> None:
        self.step += 1
        self.gc_handler.run(self.step)
        before = self.dataloader.state_dict()
        try:
            self.train_step(data_iterator)
        except DataloaderExhaustedError:
            self.step -= 1
            self.dataloader.load_state_dict(before)
            self._save(last_step=True)
            raise DataExhausted(
                f"data: the documents ended after step {self.step} of "
                f"{self.job_config.training.steps}; set data.repeat = true for more epochs, add "
                "documents, or lower training.steps"
            ) from None
        self._save(last_step=self.step == self.job_config.training.steps)
        validation = self.job_config.validation
        if validation.enable and self.validator.should_validate(self.step):
            self.outcomes.drain()
            self.validator.validate(self.model_parts, self.step)
        if self.step == 1:
            shorten_timeouts(self.job_config, self.parallel_dims)

    def _save(self, *, last_step: bool) -> None:
        if self.step in (0, self.saved_step):
            return
        if not self.checkpointer._should_save(self.step, last_step):
            return
        self.outcomes.drain()
        # between a skipped step and the next finite one, the last good checkpoint stays the last
        if self.skips.in_a_row:
            return
        self.checkpointer.save(self.step, last_step=last_step)
        self.saved_step = self.step
        if dist.get_rank() == 0:
            save_identity(self.job_config, self.identity)

    def _on_sigterm(self, *_: Any) -> None:
        self.stop_wanted = True
        self.stop_requested |= dist.get_world_size() == 1

    def _stop_on_signal(self) -> None:
        self.outcomes.drain()
        self._save(last_step=True)
        saved = "checkpoint saved" if self.checkpointer.enable else "checkpoint.enable is off"
        logger.warning(f"SIGTERM: stopped after step {self.step}, {saved}")
        self.close()
        dist.destroy_process_group()
        raise SystemExit(SIGTERM_STATUS)

    def close(self) -> None:
        """Free the graph while its process group exists, then what TorchTitan closes."""
        self.microbatch.close()
        self.dataloader.close()
        super().close()


def make_trainer(stock: type) -> type:
    """Our trainer over a given TorchTitan 0.2.2 ``Trainer`` class."""
    return type("LowprecTrainer", (LowprecTrainer, stock), {"__module__": __name__})
