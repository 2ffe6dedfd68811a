"""Run the kernel tests without a GPU, in a process whose kernels are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.mark.slow
def test_interpreted_kernels_match_the_reference():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
               str(HERE / "test_kernel.py"),
               str(HERE.parent / "hadamard" / "test_product.py"),
               str(HERE.parent / "quantize" / "test_columns.py"),
               str(HERE.parent / "quantize" / "test_kernel.py"),
               str(HERE.parent / "quantize" / "test_kernel_nvfp4.py")]  # fmt: skip
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
