"""Collectives wait less once a first step has compiled and warmed up everything."""

from datetime import timedelta

import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.utils import device_type

from titan_lowprec.titan.merged_config import MergedJobConfig


def shorten_timeouts(job_config: MergedJobConfig, parallel_dims: ParallelDims) -> None:
    """Set ``comm.train_timeout_seconds`` on every process group."""
    timeout = timedelta(seconds=job_config.comm.train_timeout_seconds)
    if device_type == "cpu":  # stock passes the device's index to the barrier: CPUs have none
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timeout, None)
    else:
        dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=parallel_dims)
