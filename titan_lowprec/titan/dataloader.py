"""TorchTitan's dataloader component over our packed documents."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.protocols.train_spec import get_train_spec

from titan_lowprec.data.dataset import PackedDataset, build_packed_dataset
from titan_lowprec.data.evaluation import validation_batches
from titan_lowprec.data.loader import Batch, PackedLoader
from titan_lowprec.data.spec import DataSpec
from titan_lowprec.titan.merged_config import MergedJobConfig


def data_spec(job_config: MergedJobConfig) -> DataSpec:
    """The ``[data]`` section as a data specification.

    Raises:
        ValueError: The section contradicts itself.
    """
    section = job_config.data
    cache_dir = section.cache_dir or str(Path(job_config.job.dump_folder) / "data_cache")
    return DataSpec(
        source=section.source,
        paths=tuple(section.paths) if section.source == "local" else (),
        hf_name=section.hf_name,
        hf_config=section.hf_config,
        hf_split=section.hf_split,
        hf_revision=section.hf_revision,
        streaming=section.streaming,
        window_documents=section.window_documents,
        text_column=section.text_column,
        tokenizer_path=section.tokenizer,
        seq_len=job_config.training.seq_len,
        max_documents=section.max_documents,
        packer=section.packer,
        long_document=section.long_document,
        min_document_tokens=section.min_document_tokens,
        seed=section.seed,
        repeat=section.repeat,
        cache_dir=cache_dir,
        add_bos=section.add_bos,
        add_eos=section.add_eos,
    )


def validation_spec(job_config: MergedJobConfig) -> DataSpec:
    """The fixed validation set: the same tokenizer and packing over ``data.validation_paths``."""
    return replace(
        data_spec(job_config),
        source="local",
        paths=tuple(job_config.data.validation_paths),
        streaming=False,
        seq_len=job_config.validation.seq_len,
        repeat=False,
    )


@lru_cache(maxsize=4)
def open_dataset(spec: DataSpec, vocab_size: int) -> PackedDataset:
    """Open a data set once per process, and check that the model's vocabulary holds its ids."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    dataset = build_packed_dataset(spec, progress=rank == 0)
    dataset.require_vocab(vocab_size)
    return dataset


def model_vocab_size(job_config: MergedJobConfig) -> int:
    """The vocabulary of the configured flavor."""
    flavors: Any = get_train_spec(job_config.model.name).model_args
    return flavors[job_config.model.flavor].vocab_size


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: MergedJobConfig
) -> PackedLoader:
    """This rank's training batches."""
    del tokenizer  # documents are tokenised by the data set
    options = job_config.training.dataloader
    return PackedLoader(
        open_dataset(data_spec(job_config), model_vocab_size(job_config)),
        batch_rows=job_config.training.local_batch_size,
        rank=dp_rank,
        world_size=dp_world_size,
        num_workers=options.num_workers,
        prefetch=options.prefetch_factor or 2,
        pin_memory=options.pin_memory and torch.cuda.is_available(),
    )


def validation_batches_of(
    job_config: MergedJobConfig, *, rank: int, world_size: int
) -> Iterator[Batch]:
    """This rank's part of a validation round; equally many batches on every rank."""
    steps = job_config.validation.steps
    return validation_batches(
        open_dataset(validation_spec(job_config), model_vocab_size(job_config)),
        batch_rows=job_config.validation.local_batch_size,
        rank=rank,
        world_size=world_size,
        max_batches=None if steps == -1 else steps,
    )
