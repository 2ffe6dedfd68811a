"""`tools/audit_reductions.py`: ours is exact; PyTorch's chunked operator, where known, is not."""

import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SHAPE = (512, 1024, 32)


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tools/audit_reductions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("chunk_rows", [4, 64, 512])
def test_ours_is_exact_for_any_chunk(audit, chunk_rows):
    finding = audit.audit("ours", audit.ours(chunk_rows), *SHAPE)
    assert finding.exact, finding


def test_loss_of_bf16_logits_is_not_exact(audit):
    finding = audit.audit("torch", audit.stock, *SHAPE)
    assert finding.loss_error > 1e-4 and not finding.exact


def test_chunked_operator_of_pytorch_depends_on_its_chunks(audit):
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in audit.KNOWN_INEXACT:
        pytest.skip(f"torch {version}: nothing is known about a chunked operator")
    small = audit.audit("torch", audit.stock_chunked("accurate", 4), *SHAPE)
    whole = audit.audit("torch", audit.stock_chunked("accurate", 512), *SHAPE)
    assert small.weight_times_floor > 4 > whole.weight_times_floor
    assert min(small.loss_error, whole.loss_error) > 1e-5
    mean = audit.audit("torch", audit.stock_chunked("accurate", 64, "mean"), *SHAPE)
    assert mean.all_ignored == "NaN"
