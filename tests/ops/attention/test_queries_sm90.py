"""dQ for Hopper compiles with the installed triton: no interpreter runs it, Gluon's names change.

Its numbers are tested on a GPU, by `test_kernel.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_all_variants_compile_without_a_gpu(tmp_path):
    command = [sys.executable, str(Path(__file__).parent / "compiled_queries.py")]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 8
    for record in records:
        assert record["by_hand"]
        assert record["limited"]
        # Q and G, two tiles each of K, V and transposed K, two barriers
        assert record["shared"] == (2 + 2 * 3) * 64 * record["head_dim"] + 2 * 8
        # steps of 32: Q K and G V over the features, dS K over the keys; the rotation by sixteens
        pieces = record["head_dim"] // 16
        assert record["products"] == 2 * record["head_dim"] // 32 + 64 // 32 + 2 * pieces
