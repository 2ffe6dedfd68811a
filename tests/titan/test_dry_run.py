"""Recipes built and sharded over ranks that do not exist."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_rank_holds_its_rows_of_every_parameter():
    command = [sys.executable, "tools/dry_run.py", "recipes/llama_tiny_mxfp8.toml", "--ranks", "8",
               "64", "--training.global_batch_size", "512"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| recipes")]
    # By hand: dim 128, 4 layers, 4 heads of 32 with 2 KV heads, FFN 384, vocabulary 2048.
    layer = [(128, 128), (64, 128), (64, 128), (128, 128), (384, 128), (128, 384), (384, 128)]
    shapes = 4 * [*layer, (128, 1), (128, 1)] + [(2048, 128), (2048, 128), (128, 1)]
    for row, ranks in zip(rows, (8, 64), strict=True):
        assert int(row[2].replace(",", "")) == ranks
        assert int(row[3].replace(",", "")) == sum(a * b for a, b in shapes)
        of_rank_0 = sum(math.ceil(a / ranks) * b for a, b in shapes)
        assert int(row[4].replace(",", "")) == of_rank_0
