"""The features tool: rows of a recipe's documents, or its target's answers, to a folder."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import get_train_spec
from tqdm import tqdm

from titan_lowprec.data.bundled import resolve_path
from titan_lowprec.data.loader import PackedLoader
from titan_lowprec.models.dflash.args import DFlashArgs
from titan_lowprec.models.dflash.feature_writer import (
    FeatureWriter,
    finish_index,
    specforge_records,
)
from titan_lowprec.models.dflash.features import UNKNOWN_TARGET, FeatureIdentity, FeatureIndex
from titan_lowprec.titan.check_config import check_config
from titan_lowprec.titan.dataloader import data_spec, model_vocab_size, open_dataset
from titan_lowprec.titan.dflash.args import DraftModelArgs
from titan_lowprec.titan.dflash.rows import Answers, write_rows
from titan_lowprec.titan.dflash.target import build_target, target_name
from titan_lowprec.titan.dflash.vocabulary import read_vocabulary
from titan_lowprec.titan.merged_config import MergedJobConfig


@dataclass(frozen=True)
class StoreOptions:
    """What to write."""

    folder: Path
    rows: int | None
    """Rows of all ranks; ``None`` for one epoch."""
    answers: Answers | None
    tokens_only: bool
    """Leave hidden states out: they are computed when the rows are trained on."""
    shard_batches: int


def resolved_args(job_config: MergedJobConfig) -> DraftModelArgs:
    """The recipe's flavor with everything that the job file decides."""
    flavors: Any = get_train_spec(job_config.model.name).model_args
    args: DraftModelArgs = flavors[job_config.model.flavor]
    args.update_from_config(job_config)
    return args


def store_rows(job_config: MergedJobConfig, options: StoreOptions) -> FeatureIndex | None:
    """Write a recipe's rows; under ``torchrun`` every rank writes its own files.

    Returns:
        The index on rank 0.
    """
    from torchtitan.tools.utils import device_module, device_type

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    job_config.dflash.features, job_config.dflash.features_path = "online", ""
    check_config(job_config, device_type=device_type, world_size=world_size)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}")
        device_module.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    args = resolved_args(job_config)
    assert args.draft is not None
    target = build_target(
        args,
        job_config,
        device=device,
        dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
        max_positions=job_config.training.seq_len,
    )
    batch_rows = job_config.training.local_batch_size
    identity = identity_of(
        job_config,
        args.draft,
        target=target_name(args, target.tables),
        tap_layers=() if options.tokens_only else args.draft.tap_layers,
    )
    spec = replace(data_spec(job_config), repeat=False)
    loader = PackedLoader(
        open_dataset(spec, model_vocab_size(job_config)),
        batch_rows=batch_rows,
        rank=rank,
        world_size=world_size,
    )
    return write_rows(
        loader,
        target,
        identity,
        options.folder,
        answers=options.answers,
        batches=None if options.rows is None else -(-options.rows // (batch_rows * world_size)),
        shard_batches=options.shard_batches,
    )


def identity_of(
    job_config: MergedJobConfig, draft: DFlashArgs, *, target: str, tap_layers: tuple[int, ...]
) -> FeatureIdentity:
    """What rows of a recipe's draft and tokenizer belong to."""
    vocabulary = read_vocabulary(Path(resolve_path(job_config.data.tokenizer)))
    return FeatureIdentity(
        target=target,
        tap_layers=tap_layers,
        model_dim=draft.model_dim,
        vocab_size=draft.vocab_size,
        dtype=job_config.training.mixed_precision_param,
        tokenizer_sha256=vocabulary.sha256,
        tokenizer_entries=vocabulary.entries,
        eos_ids=vocabulary.eos_ids,
    )


def import_specforge(
    job_config: MergedJobConfig, files: list[Path], folder: Path, *, shard_records: int
) -> FeatureIndex:
    """Turn SpecForge's files into a folder of features for a recipe's draft.

    Their target is not known, so its name is not compared.
    """
    job_config.dflash.features, job_config.dflash.features_path = "online", ""
    args = resolved_args(job_config)
    assert args.draft is not None
    dtype = job_config.training.mixed_precision_param
    identity = identity_of(
        job_config, args.draft, target=UNKNOWN_TARGET, tap_layers=args.draft.tap_layers
    )
    writer = FeatureWriter(folder, identity, source="specforge", rank=0, per_shard=shard_records)
    left = files[writer.batches :]
    for record in tqdm(specforge_records(left, dtype=dtype), desc="files", total=len(left)):
        writer.add_batch([record])
    writer.close()
    return finish_index(folder, identity, ranks=1)
