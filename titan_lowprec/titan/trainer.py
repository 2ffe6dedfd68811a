"""The trainer: TorchTitan's, with a training loop that loses nothing.

What differs from stock 0.2.2: labels and metadata per document, one global count per step, steps
with non-finite values skipped, one metrics record per step, a refusal to resume another run,
checkpoints on SIGTERM, and an error status when the data ends early.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.tools.utils import device_type
from torchtitan.train import Trainer

from titan_lowprec.data.loader import PackedLoader
from titan_lowprec.titan.check_config import check_config
from titan_lowprec.titan.counts import StepCounts, reduce_counts
from titan_lowprec.titan.loss import loss_sum_of_batch, step_denominator
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.metrics import LowprecMetricsProcessor, StepRecord
from titan_lowprec.titan.resume import check_resume, run_identity, save_identity
from titan_lowprec.titan.run_record import save_run_record

SIGTERM_STATUS = 128 + signal.SIGTERM
_Stock = Trainer if TYPE_CHECKING else object
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class DataExhausted(RuntimeError):
    """The data ended before ``training.steps`` and ``data.repeat`` is off."""


class NonFiniteRun(RuntimeError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


class LowprecTrainer(_Stock):
    """Mixin over a TorchTitan 0.2.2 ``Trainer``; ``make_trainer`` joins the two."""

    job_config: MergedJobConfig
    dataloader: PackedLoader
    metrics_processor: LowprecMetricsProcessor

    def __init__(self, job_config: MergedJobConfig) -> None:
        world_size = int(os.environ["WORLD_SIZE"])
        check_config(job_config, device_type=device_type, world_size=world_size)
        if device_type == "cpu":
            job_config.comm.trace_buf_size = 0  # the flight recorder belongs to NCCL
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.valid_tokens_seen = 0
        self.stop_requested = False
        self.saved_step = -1
        super().__init__(job_config)
        self.metrics_processor.attach_loss(self.loss_fn)
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
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.valid_tokens_seen = state_dict["valid_tokens_seen"]
        self.skipped_steps = state_dict["skipped_steps"]

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
        """One optimizer step, or its cancellation if gradients are not finite."""
        self.metrics_processor.begin_step()
        self.optimizers.zero_grad()
        lr = float(self.lr_schedulers.schedulers[0].get_last_lr()[0])
        self.data_wait_s = 0.0
        microbatches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        counts = self._global_counts(microbatches)
        denominator = step_denominator(self.loss_fn, microbatches, counts.valid_tokens, self.device)
        losses = []
        for inputs, labels in microbatches:
            on_device = {k: v.to(self.device, non_blocking=True) for k, v in inputs.items()}
            losses.append(
                self.forward_backward_step(
                    input_dict=on_device,
                    labels=labels.to(self.device, non_blocking=True),
                    global_valid_tokens=denominator,
                )
            )
        grad_norm = dist_utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            self.job_config.training.max_norm,
            foreach=True,
        )
        loss = self._global_loss(torch.stack(losses).sum())
        self.checkpointer.maybe_wait_for_staging()
        self._update(loss, float(grad_norm))
        self.ntokens_seen += counts.tokens
        self.valid_tokens_seen += counts.valid_tokens
        self.metrics_processor.log_step(self._record(counts, loss, float(grad_norm), lr))

    def _update(self, loss: float, grad_norm: float) -> None:
        """Step the optimizer, unless the step is not finite."""
        if torch.isfinite(torch.tensor([loss, grad_norm])).all():
            self.skipped_in_a_row = 0
            self.optimizers.step()
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            limit = self.job_config.training.max_skipped_steps
            logger.warning(
                f"step {self.step}: loss {loss}, gradient norm {grad_norm}: step skipped "
                f"({self.skipped_in_a_row} in a row, at most {limit})"
            )
        self.lr_schedulers.step()

    def _global_counts(self, microbatches: list[Batch]) -> StepCounts:
        """Counts of the whole step, over all ranks, with the stop signal of any rank."""
        counts = StepCounts.of(microbatches)
        first_of_group = self.parallel_dims.non_data_parallel_size == 1 or (
            self.parallel_dims.tp_enabled
            and self.parallel_dims.get_mesh("tp").get_local_rank() == 0
        )
        counts, self.stop_requested = reduce_counts(
            counts, stop=self.stop_requested, contributes=first_of_group, device=self.device
        )
        return counts

    def _global_loss(self, loss: torch.Tensor) -> float:
        if self.parallel_dims.dp_enabled:
            return dist_utils.dist_sum(loss, self.parallel_dims.get_mesh("batch"))
        return loss.item()

    def _record(self, counts: StepCounts, loss: float, grad_norm: float, lr: float) -> StepRecord:
        return StepRecord(
            step=self.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_seen=self.ntokens_seen,
            valid_tokens_seen=self.valid_tokens_seen,
            valid_tokens=counts.valid_tokens,
            rows=counts.rows,
            documents=counts.documents,
            padding_tokens=counts.padding_tokens,
            attention_pairs=counts.attention_pairs,
            skipped_steps=self.skipped_steps,
            fingerprint=counts.fingerprint_hex,
            data_wait_s=self.data_wait_s,
        )

    # ---- the loop -------------------------------------------------------------------------

    def train(self) -> None:
        """Train to ``training.steps``; every way out leaves a checkpoint that can be resumed."""
        self._resume()
        signal.signal(signal.SIGTERM, self._on_sigterm)
        profiling = {
            "profiling_config": self.job_config.profiling,
            "global_step": self.step,
            "base_folder": self.job_config.job.dump_folder,
        }
        with (
            maybe_enable_profiling(**profiling) as profiler,
            maybe_enable_memory_snapshot(**profiling) as memory_profiler,
        ):
            data_iterator = self.batch_generator(self.dataloader)
            while self.should_continue_training():
                self._one_step(data_iterator)
                for running in (profiler, memory_profiler):
                    if running:
                        running.step()
                if self.stop_requested:
                    self._stop_on_signal()
        logger.info("Training completed")

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
        if self.skipped_in_a_row >= self.job_config.training.max_skipped_steps:
            raise NonFiniteRun(
                f"step {self.step}: {self.skipped_in_a_row} steps in a row were not finite "
                "(training.max_skipped_steps); the last checkpoint is intact: lower optimizer.lr "
                "or look at attention.recipe and the data"
            )
        self._save(last_step=self.step == self.job_config.training.steps)
        validation = self.job_config.validation
        if validation.enable and self.validator.should_validate(self.step):
            self.validator.validate(self.model_parts, self.step)
        if self.step == 1:
            self._shorten_timeouts()

    def _save(self, *, last_step: bool) -> None:
        # between a skipped step and the next finite one, the last good checkpoint stays the last
        if self.skipped_in_a_row or self.step in (0, self.saved_step):
            return
        if self.checkpointer._should_save(self.step, last_step):
            self.checkpointer.save(self.step, last_step=last_step)
            self.saved_step = self.step
            if dist.get_rank() == 0:
                save_identity(self.job_config, self.identity)

    def _shorten_timeouts(self) -> None:
        timeout = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
        if device_type == "cpu":  # stock passes the device's index to the barrier: CPUs have none
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(timeout, None)
        else:
            dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        del signum, frame
        self.stop_requested = True

    def _stop_on_signal(self) -> None:
        self._save(last_step=True)
        saved = "checkpoint saved" if self.checkpointer.enable else "checkpoint.enable is off"
        logger.warning(f"SIGTERM: stopped after step {self.step}, {saved}")
        self.close()
        dist.destroy_process_group()
        raise SystemExit(SIGTERM_STATUS)


def make_trainer(stock: type) -> type:
    """Our trainer over a given TorchTitan 0.2.2 ``Trainer`` class."""
    return type("LowprecTrainer", (LowprecTrainer, stock), {"__module__": __name__})
