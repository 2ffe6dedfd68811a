"""TorchTitan's dataloader component for drafts: packed text or stored features, with anchors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.protocols.train_spec import get_train_spec

from titan_lowprec.models.dflash.anchors import AnchorSampler
from titan_lowprec.models.dflash.feature_loader import FeatureLoader
from titan_lowprec.models.dflash.features import FeatureReader
from titan_lowprec.titan.dataloader import build_dataloader, validation_batches_of
from titan_lowprec.titan.dflash.args import DraftModelArgs, draft_args
from titan_lowprec.titan.dflash.batch import AnchoredLoader, RowLoader, with_anchors
from titan_lowprec.titan.dflash.vocabulary import vocabulary_of
from titan_lowprec.titan.dflash.weights import require_weights
from titan_lowprec.titan.loss import Batch
from titan_lowprec.titan.merged_config import MergedJobConfig

VALIDATION_SEED = 20260206
"""Of the anchors of validation rounds, which are the same every round and in every run."""


def build_draft_loader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: MergedJobConfig
) -> AnchoredLoader:
    """This rank's training batches with anchors; the first component that a run builds."""
    require_weights(job_config.dflash.target_path)
    section = job_config.dflash
    if section.features_path:
        reader = open_features(job_config)
        rows: RowLoader = FeatureLoader(
            reader,
            row_tokens=job_config.training.seq_len,
            batch_rows=job_config.training.local_batch_size,
            rank=dp_rank,
            world_size=dp_world_size,
            seed=job_config.data.seed,
            repeat=job_config.data.repeat,
        )
    else:
        rows = build_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
    sampler = AnchorSampler(seed=section.anchor_seed, slots=section.anchor_slots)
    return AnchoredLoader(rows, sampler)


def open_features(job_config: MergedJobConfig) -> FeatureReader:
    """Stored rows of the draft's sizes and, with features, of its taps.

    Raises:
        ValueError: They belong to another kind of target.
    """
    flavors: Any = get_train_spec(job_config.model.name).model_args
    args: DraftModelArgs = flavors[job_config.model.flavor]
    draft = draft_args(args, job_config, vocabulary_of(job_config))
    reader = FeatureReader(Path(job_config.dflash.features_path))
    found = reader.index.identity
    wanted, got = (draft.vocab_size, draft.model_dim), (found.vocab_size, found.model_dim)
    if job_config.dflash.features == "offline":
        wanted, got = (*wanted, draft.tap_layers), (*got, found.tap_layers)
    if wanted != got:
        raise ValueError(
            f"dflash.features_path: must have vocabulary, hidden size (and taps) {wanted}, got "
            f"{got}; write it for {job_config.model.flavor}, or set dflash.taps"
        )
    return reader


def draft_validation_batches(
    job_config: MergedJobConfig, *, rank: int, world_size: int
) -> Iterator[Batch]:
    """This rank's part of a validation round, with the same anchors every round."""
    sampler = AnchorSampler(seed=VALIDATION_SEED, slots=job_config.dflash.anchor_slots)
    rows = job_config.validation.local_batch_size
    for batch in validation_batches_of(job_config, rank=rank, world_size=world_size):
        yield with_anchors(batch, sampler, first_row=rank * rows, total_rows=world_size * rows)
