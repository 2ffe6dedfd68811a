"""What a step of draft training computes: target, draft, weighted loss, acceptance."""

from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from titan_lowprec.models.dflash.acceptance import (
    AcceptanceCounts,
    correct_drafts,
    count_acceptance,
)
from titan_lowprec.models.dflash.attention import build_mask
from titan_lowprec.models.dflash.blocks import Blocks
from titan_lowprec.models.dflash.features import UNKNOWN_TARGET, read_index
from titan_lowprec.models.dflash.loss import DraftHead, denominator, draft_loss
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.models.dflash.tables import FrozenTables
from titan_lowprec.shapes import Float, Tensor
from titan_lowprec.titan.dflash.args import DraftModelArgs
from titan_lowprec.titan.dflash.batch import anchors_of, blocks_of
from titan_lowprec.titan.dflash.target import FrozenTarget, build_tables, build_target, target_name
from titan_lowprec.titan.loss import Batch, BatchLoss
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.parallelize import data_parallel_mesh


class DraftObjective(BatchLoss):
    """The loss of a draft over the hidden states of a target that it holds, frozen.

    The target is in no model part: the optimizer and checkpoints do not know it.
    """

    def __init__(
        self,
        args: DraftModelArgs,
        job_config: MergedJobConfig,
        *,
        target: FrozenTarget | None,
        tables: FrozenTables,
    ) -> None:
        """Compose; `build_draft_objective` makes target and tables.

        Args:
            args: With ``draft`` resolved.
            job_config: ``[dflash]`` and ``[loss]``.
            target: ``None`` where batches bring features.
            tables: The target's.
        """
        assert args.draft is not None
        self.args, self.draft, self.job_config = args, args.draft, job_config
        self.target, self.tables = target, tables
        bf16 = job_config.loss.impl == "logits_bf16"
        self.head: DraftHead = "logits_bf16" if bf16 else args.head_impl
        self.step = 0
        """Optimizer steps begun."""
        self.measuring = False  # acceptance is counted in the current step
        self.acceptance: AcceptanceCounts | None = None
        self._figures: dict[str, Any] = {}

    def obstacle_to_capture(self) -> str | None:
        """The target's reference attention reads offsets; everything else stays on the device."""
        if self.target is None or self.target.impl == "triton":
            return None
        return (
            "the target's attention runs as its PyTorch reference here, which reads document "
            "offsets on the host"
        )

    def features(self, inputs: dict[str, Tensor]) -> Float[Tensor, "B S O"]:
        """Hidden states of a batch on the device, from the target or from the batch."""
        if self.target is None:
            return inputs["features"].to(self.tables.embed_VE.dtype)
        return self.target.features(
            inputs["input"], position_BS=inputs["positions"], cu_seqlens_BM=inputs["cu_seqlens"]
        )

    def hidden(
        self, model: nn.Module, inputs: dict[str, Tensor], blocks: Blocks
    ) -> Float[Tensor, "B T E"]:
        """The draft's hidden states of all blocks."""
        impl = self.args.attention_impl
        mask = DraftMask(anchors_of(inputs), inputs["document_ids"], self.draft.block_tokens)
        return model(
            self.features(inputs),
            self.tables.embed(blocks.input_BT),
            context_position_BS=inputs["positions"],
            block_position_BT=blocks.position_BT,
            mask=build_mask(mask, impl=impl),
            impl=impl,
        )

    def loss_sum(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        """Weighted sum over a microbatch's blocks; acceptance is counted where it is due."""
        del labels  # blocks have their own
        blocks = blocks_of(inputs, self.draft)
        hidden_BTE = self.hidden(model, inputs, blocks)
        if self.measuring:
            self._count(hidden_BTE.detach(), blocks)
        loss = draft_loss(
            hidden_BTE,
            blocks,
            self.tables,
            objective=self.job_config.dflash.objective,
            chunk_rows=self.job_config.loss.chunk_rows,
            impl=self.head,
        )
        return loss.loss_sum

    def _count(self, hidden_BTE: Float[Tensor, "B T E"], blocks: Blocks) -> None:
        chunk_rows = self.job_config.loss.chunk_rows
        correct = correct_drafts(hidden_BTE, blocks, self.tables, chunk_rows=chunk_rows)
        counts = count_acceptance(correct, blocks.valid_BAP)
        self.acceptance = counts if self.acceptance is None else self.acceptance + counts

    def batch_weights(self, inputs: dict[str, Tensor]) -> Float[Tensor, " 3"]:
        """A microbatch's share of the denominator, its used slots and its labels."""
        blocks = blocks_of(inputs, self.draft)
        share = denominator(blocks, objective=self.job_config.dflash.objective)
        slots, labels = inputs["anchor_keep"].sum(), blocks.valid_BAP.sum()
        return torch.stack([share.double(), slots.double(), labels.double()])

    def step_denominator(self, microbatches: list[Batch], device: torch.device) -> Tensor:
        """Sum of weights (or of blocks, for D-PACE) over all ranks and microbatches."""
        self.step += 1
        freq, last = self.job_config.dflash.acceptance_freq, self.job_config.training.steps
        self.measuring = self.step == 1 or self.step % freq == 0 or self.step == last
        local = torch.stack([self.batch_weights(inputs) for inputs, _ in microbatches]).sum(0)
        total, anchors, labels = sum_over_ranks(local.to(device)).tolist()
        self._figures = {
            "loss_denominator": total,
            "anchors": int(anchors),
            "draft_labels": int(labels),
        }
        # a step without any anchor has a sum of 0: its loss is 0, not NaN
        return torch.tensor(total if total > 0 else 1.0, device=device, dtype=torch.float32)

    def take_figures(self, device: torch.device) -> dict[str, Any]:
        """What ``metrics.jsonl`` gets for the step; every rank calls it."""
        figures = dict(self._figures)
        if self.measuring and self.acceptance is not None:
            figures |= acceptance_figures(self.take_acceptance(device))
        self.measuring = False
        return figures

    def take_acceptance(self, device: torch.device) -> AcceptanceCounts:
        """Counts of all ranks since they were last taken."""
        assert self.acceptance is not None
        counts, self.acceptance = self.acceptance, None
        parts = [part.reshape(-1).to(device, torch.float64) for part in astuple(counts)]
        summed = sum_over_ranks(torch.cat(parts)).long().cpu().split([len(part) for part in parts])
        shaped = [part if part.numel() > 1 else part[0] for part in summed]
        names = (field.name for field in fields(AcceptanceCounts))
        return AcceptanceCounts(**dict(zip(names, shaped, strict=True)))


def acceptance_figures(counts: AcceptanceCounts) -> dict[str, Any]:
    """Acceptance lengths by two conventions, and accuracy by slot (of slots with labels)."""
    valid = counts.valid_P[1:]
    accuracy = counts.correct_P[1:].double() / valid.clamp(min=1)
    return {
        "acceptance_strict": counts.strict(),
        "acceptance_pass_through": counts.pass_through(),
        "slot_accuracy": [
            round(a, 6) if n else None
            for a, n in zip(accuracy.tolist(), valid.tolist(), strict=True)
        ],
    }


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum over all processes, which all read different rows (no tensor parallelism here)."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def check_target_of_features(job_config: MergedJobConfig, name: str) -> None:
    """Refuse embedding and head of another target than the features come from.

    Raises:
        ValueError: They differ; an import whose target is not known says so itself.
    """
    folder = Path(job_config.dflash.features_path)
    found = read_index(folder).identity.target
    if found not in (name, UNKNOWN_TARGET):
        raise ValueError(
            f"dflash.target_path: features in {folder} come from {found!r}, got {name!r}; name "
            "the target that wrote them"
        )


def build_draft_objective(
    job_config: MergedJobConfig, parallel_dims: ParallelDims, **kwargs: Any
) -> DraftObjective:
    """The ``build_loss_fn`` of the train spec: loads the target, or its tables alone."""
    del kwargs
    flavors: Any = get_train_spec(job_config.model.name).model_args
    args: DraftModelArgs = flavors[job_config.model.flavor]
    device = torch.device(device_type)
    dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    target = None
    if job_config.dflash.features == "online":
        target = build_target(
            args,
            job_config,
            device=device,
            dtype=dtype,
            max_positions=job_config.training.seq_len,
        )
        if job_config.dflash.shard_target:
            target.shard(data_parallel_mesh(parallel_dims))
        tables = target.tables
    else:
        tables = build_tables(args, job_config, device=device, dtype=dtype)
    assert args.draft is not None
    name = target_name(args, tables)
    if target is None:
        check_target_of_features(job_config, name)
    logger.info(
        f"Draft of {name}, {job_config.dflash.features} features: taps {args.draft.tap_layers}, "
        f"mask token {args.draft.mask_id}"
    )
    return DraftObjective(args, job_config, target=target, tables=tables)
