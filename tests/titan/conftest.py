"""Runs of the real program in processes of its own, small enough for two CPU cores."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from titan_lowprec.titan.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "recipes" / "llama_tiny_mxfp8.toml"
SMALL = (
    "--training.seq_len=64",
    "--validation.seq_len=64",
    "--training.local_batch_size=2",
    "--validation.no-enable",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.total_steps=2000",
)


@dataclass(frozen=True)
class Run:
    """A finished program."""

    status: int
    output: str
    folder: Path

    def metrics(self, kind="train"):
        """Effective records of one kind, in order."""
        return [
            record
            for record in read_metrics(self.folder / "metrics.jsonl")
            if record["kind"] == kind
        ]

    def column(self, name):
        """One figure of every training step."""
        return [record[name] for record in self.metrics()]


def command(folder, *args, processes=1, module="titan_lowprec.train", recipe=TINY):
    """The command line of a small run."""
    launcher = [sys.executable, "-m"]
    if processes > 1 or module == "torchtitan.train":
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(processes),
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            "localhost:0",
            "-m",
        ]
    cache = Path(folder).parent / "cache"
    return [
        *launcher,
        module,
        "--job.config",
        str(recipe),
        *SMALL,
        f"--job.dump_folder={folder}",
        f"--data.cache_dir={cache}",
        *args,
    ]


def environment(**extra):
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **extra}


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Run the program to its end: ``train(name, *overrides, processes=1, module=...)``."""
    base = tmp_path_factory.mktemp("runs")

    def run(name, *args, env=None, **options):
        folder = base / name
        result = subprocess.run(
            command(folder, *args, **options),
            env=environment(**(env or {})),
            cwd=ROOT,
            text=True,
            timeout=300,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return Run(result.returncode, result.stdout, folder)

    return run
