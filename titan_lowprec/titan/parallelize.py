"""Tensor parallel, activation checkpointing, compile and sharding of our models."""

from typing import Literal, cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_tp
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from titan_lowprec.titan.activation import apply_activation_checkpointing
from titan_lowprec.titan.conversion import check_conversion
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.one_process import hold_whole


def parallelize_llama(
    model: nn.Module, parallel_dims: ParallelDims, job_config: MergedJobConfig
) -> nn.Module:
    """Apply what the job file asks for, in TorchTitan's order.

    Parameters are cast to ``mixed_precision_param`` in one place on every mesh, pure replication
    and one process included, so that one GPU computes in the same types as many (stock TorchTitan
    uses autocast there). ``parallelism.one_process`` says what does it on one; on several it is
    FSDP2.
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
    if resolve_one_process(job_config, world_size=parallel_dims.world_size) == "direct":
        hold_in_one_process(model, mesh, job_config)
    else:
        shard(model, mesh, job_config)
    return model


def units_of(model: nn.Module, policy: str) -> dict[tuple[nn.Module, ...], bool]:
    """What is cast and gathered together, and whether that is undone after the forward."""
    embedding, norm, output = (
        model.get_submodule(name) for name in ("tok_embeddings", "norm", "output")
    )
    blocks = model.get_submodule("layers").children()
    units = {(module,): policy != "never" for module in (embedding, *blocks)}
    return units | {(norm, output): policy == "always"}  # the backward begins with them


def shard(model: nn.Module, mesh: DeviceMesh, job_config: MergedJobConfig) -> None:
    """FSDP2 in TorchTitan's units, gradients summed.

    Inputs of a unit keep their types: hidden states are ``mixed_precision_param`` already, and the
    rotation of queries and keys must stay fp32.
    """
    training = job_config.training
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    policy = job_config.parallelism.fsdp_reshard_after_forward
    for modules, reshard in units_of(model, policy).items():
        fully_shard(list(modules), reshard_after_forward=reshard, **options)
    fully_shard(model, **options)
    sum_gradients(model, mesh)
    logger.info(f"Applied FSDP2 over {tuple(mesh.shape)} ({', '.join(mesh.mesh_dim_names or ())})")


def hold_in_one_process(model: nn.Module, mesh: DeviceMesh, job_config: MergedJobConfig) -> None:
    """FSDP2's numbers in one process, without collectives with itself.

    Casts are freed after the forward whatever ``fsdp_reshard_after_forward`` says: to make them
    again costs one pass over the parameters, and no communication.
    """
    training = job_config.training
    units = units_of(model, "default").items()
    hold_whole(
        model,
        {module: reshard for modules, reshard in units for module in modules},
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    logger.info("One process: parameters are cast and gradients taken directly, without FSDP2")


def resolve_one_process(
    job_config: MergedJobConfig, *, world_size: int
) -> Literal["direct", "fsdp2"]:
    """``parallelism.one_process``, decided; several processes always shard."""
    wanted = job_config.parallelism.one_process
    if wanted == "auto":
        wanted = "fsdp2" if job_config.training.enable_cpu_offload else "direct"
    return wanted if world_size == 1 else "fsdp2"


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
