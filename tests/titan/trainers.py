"""The real trainer inside the test's process, on a GPU, with a model that the kernels take."""

import dataclasses
import os
import socket
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.config import ConfigManager
from torchtitan.train import Trainer

import titan_lowprec.titan.register  # noqa: F401
from titan_lowprec.titan.llama3.args import FLAVORS, LowprecLlamaArgs
from titan_lowprec.titan.trainer import make_trainer

SMALL = Path(__file__).with_name("small.toml")
FLAVOR = "kernels"
ARGS = LowprecLlamaArgs(
    dim=256, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=2048, multiple_of=64
)
ROWS, TOKENS, DOCUMENTS = 2, 512, 32
COMMON = (
    f"--model.flavor={FLAVOR}",
    f"--training.seq_len={TOKENS}",
    f"--validation.seq_len={TOKENS}",
    "--validation.no-enable",
    "--checkpoint.no-enable",
    f"--training.local_batch_size={ROWS}",
    f"--data.max_documents={DOCUMENTS}",
    "--activation_checkpoint.mode=none",
    "--training.dataloader.num_workers=2",
    "--debug.seed=1",
    "--training.dataloader.pin_memory",
)


@contextmanager
def running_trainer(folder, *overrides):
    """A trainer of the small recipe with a model of head dimension 64; closed at the end."""
    FLAVORS[FLAVOR] = dataclasses.replace(ARGS)
    arguments = [
        f"--job.config_file={SMALL}",
        f"--job.dump_folder={folder}",
        f"--data.cache_dir={Path(folder).parent / 'cache'}",
        *COMMON,
        *overrides,
    ]
    try:
        with trainer_of(arguments) as trainer:
            yield trainer
    finally:
        del FLAVORS[FLAVOR]


@contextmanager
def trainer_of(arguments):
    """The trainer of a command line; one process, or one of those that ``torchrun`` started.

    The environment is as before at the end: a process started later must not find this one's port.
    """
    environment = dict(os.environ)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        single = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        os.environ.update({k: str(v) for k, v in single.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    trainer = None
    try:
        trainer = make_trainer(Trainer)(ConfigManager().parse_args(arguments))
        trainer.metrics_processor.resume_at(0)
        yield trainer
    finally:
        if trainer is not None:
            trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        torch._dynamo.reset()
        os.environ.clear()
        os.environ.update(environment)


def batch(layouts, *, generator):
    """Rows with documents of given lengths, a tail where they are shorter than the row."""
    rows = len(layouts)
    tokens = torch.randint(0, 2048, (rows, TOKENS), generator=generator)
    labels = torch.roll(tokens, -1, dims=1)
    offsets = torch.zeros(rows, DOCUMENTS + 1, dtype=torch.int32)
    positions = torch.zeros(rows, TOKENS, dtype=torch.int64)
    for row, lengths in enumerate(layouts):
        assert len(lengths) <= DOCUMENTS and sum(lengths) <= TOKENS
        ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        offsets[row, 1 : len(lengths) + 1] = ends
        offsets[row, len(lengths) + 1 :] = ends[-1]
        for end, length in zip(ends.tolist(), lengths, strict=True):
            positions[row, end - length : end] = torch.arange(length)
            labels[row, end - 1] = -100
        labels[row, ends[-1] :] = -100
    inputs = {"input": tokens, "positions": positions, "cu_seqlens": offsets}
    for unread in ("document_ids", "block_index"):  # the loader's batches have them
        inputs[unread] = torch.zeros(rows, TOKENS, dtype=torch.int32)
    return {name: x.pin_memory() for name, x in inputs.items()}, labels.pin_memory()
