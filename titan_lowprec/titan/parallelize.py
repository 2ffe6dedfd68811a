"""Tensor parallel, activation checkpointing, compile and sharding of our models."""

from typing import cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import (
    apply_compile,
    apply_fsdp,
    apply_tp,
)
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from titan_lowprec.titan.activation import apply_activation_checkpointing
from titan_lowprec.titan.conversion import check_conversion
from titan_lowprec.titan.merged_config import MergedJobConfig


def parallelize_llama(
    model: nn.Module, parallel_dims: ParallelDims, job_config: MergedJobConfig
) -> nn.Module:
    """Apply what the job file asks for, in TorchTitan's order.

    Data parallelism is FSDP2 on every mesh, one process and pure replication included: parameters
    are then cast to ``mixed_precision_param`` in one place, and one GPU computes in the same
    types as many (stock TorchTitan uses autocast there).
    """
    check_conversion(model, job_config)
    if parallel_dims.tp_enabled:
        apply_tp(
            model,
            parallel_dims.get_mesh("tp"),
            loss_parallel=False,  # our cross-entropy reduces whole rows of logits
            enable_float8_tensorwise_tp=False,
        )
    mesh = data_parallel_mesh(parallel_dims)
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    apply_activation_checkpointing(model, job_config, compiled=compiled)
    if compiled:
        apply_compile(model, job_config.compile)
    apply_fsdp(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=job_config.training.enable_cpu_offload,
        reshard_after_forward_policy=job_config.parallelism.fsdp_reshard_after_forward,
    )
    sum_gradients(model, mesh)
    logger.info(
        f"Applied FSDP2: {parallel_dims.dp_replicate} replicas of {parallel_dims.dp_shard} shards"
    )
    return model


def sum_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let FSDP2 add gradients over ranks and divide nothing: the trainer's denominator is global.

    On a mesh of one, a factor of 1.0 would cost a division of every gradient, and no factor divides
    by the size, which is one.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_gradient_divide_factor(1.0 if mesh.size() > 1 else cast(float, None))
        if device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def data_parallel_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """The mesh that parameters are sharded over, also where its size is one.

    ``ParallelDims.get_mesh`` refuses dimensions of size one, so this reads its private table.
    """
    assert parallel_dims.world_mesh is not None  # builds the table
    dense = parallel_dims._global_meshes["dense"]
    if parallel_dims.dp_replicate_enabled:
        return dense["dp_replicate", "fsdp"]
    return dense["fsdp"]
