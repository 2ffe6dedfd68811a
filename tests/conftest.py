"""Fixtures for all tests: seeds from the test's own name, restored global state, GPU skips."""

import os
import random
import zlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lowprec import _autoload

_autoload.assume_cpu_without_accelerator()  # before any test file imports TorchTitan


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed_from_test_id(request):
    """Give each test its own reproducible random state."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def two_counted_ranks():
    """A mesh of two ranks of which this process is one; collectives are counted, not carried out.

    FSDP gathers nothing on one rank.
    """
    if dist.is_initialized():
        pytest.skip("another test left a process group behind")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    os.environ.setdefault("LOCAL_RANK", "0")
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
