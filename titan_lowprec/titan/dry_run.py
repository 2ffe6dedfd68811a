"""Build and shard a recipe's model for many ranks on one machine, without any of their devices.

PyTorch's ``fake`` process group answers every collective at once, and parameters stay on the meta
device: what rank 0 of N would hold is counted, nothing is computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

from titan_lowprec.titan.check_config import check_config
from titan_lowprec.titan.estimate import MemoryEstimate, memory_estimate
from titan_lowprec.titan.merged_config import MergedJobConfig


@dataclass(frozen=True, slots=True)
class ShardedSize:
    """What rank 0 holds."""

    ranks: int
    parameters: int
    """Of the whole model."""
    local_parameters: int
    local_bytes: int
    """Parameters, gradients and AdamW's two moments of the shard."""
    estimate: MemoryEstimate
    """With activations, logits and gathered layers, from `estimate.py`."""


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Be rank 0 of ``world_size`` whose collectives do nothing.

    Raises:
        ValueError: A process group exists already.
    """
    if dist.is_initialized():
        raise ValueError("fake_process_group: needs a process without a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_on_meta(job_config: MergedJobConfig, *, world_size: int) -> ShardedSize:
    """Check a configuration, build its model on the meta device and shard it over fake ranks.

    Args:
        job_config: A resolved configuration; see ``validate.load_recipe``.
        world_size: Ranks to pretend.

    Raises:
        ConfigError: The configuration cannot work on that many GPUs.
        ValueError: A process group exists already.
    """
    check_config(job_config, device_type="cuda", world_size=world_size)
    spec = get_train_spec(job_config.model.name)
    args: Any = spec.model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    parallelism = job_config.parallelism
    with fake_process_group(world_size):
        dims = ParallelDims(
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=parallelism.data_parallel_shard_degree,
            cp=parallelism.context_parallel_degree,
            tp=parallelism.tensor_parallel_degree,
            pp=parallelism.pipeline_parallel_degree,
            ep=parallelism.expert_parallel_degree,
            etp=parallelism.expert_tensor_parallel_degree,
            world_size=world_size,
        )
        with (
            torch.device("meta"),
            _default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]),
        ):
            model = spec.model_cls(args)
        spec.parallelize_fn(model, dims, job_config)
        total = local = local_bytes = 0
        for parameter in model.parameters():
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            total += parameter.numel()
            local += shard.numel()
            local_bytes += 4 * shard.numel() * shard.element_size()
    return ShardedSize(
        ranks=world_size,
        parameters=total,
        local_parameters=local,
        local_bytes=local_bytes,
        estimate=memory_estimate(job_config, world_size=world_size),
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
