"""Activation checkpointing, compile and sharding of the draft."""

import dataclasses

import torch.nn as nn
import torchtitan.distributed.activation_checkpoint as stock_ac
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list, apply_compile
from torchtitan.tools.logging import logger

from titan_lowprec.titan.conversion import check_conversion
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.parallelize import data_parallel_mesh, sum_gradients


def parallelize_draft(
    model: nn.Module, parallel_dims: ParallelDims, job_config: MergedJobConfig
) -> nn.Module:
    """Wrap the draft in FSDP2 on every mesh, one process included, layer by layer."""
    check_conversion(model, job_config)
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        stock_ac._layer_sac_count = 0  # process-global upstream
        stock_ac.apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=_op_sac_save_list,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job_config.compile)
    training = job_config.training
    mesh = data_parallel_mesh(parallel_dims)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    reshard = job_config.parallelism.fsdp_reshard_after_forward != "never"
    # The model casts what comes in; a layer must not: its rotary tables are and stay fp32.
    inner = dataclasses.replace(policy, cast_forward_inputs=False)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=inner)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    sum_gradients(model, mesh)
    logger.info(
        f"Applied FSDP2 to the draft: {parallel_dims.dp_replicate} replicas of "
        f"{parallel_dims.dp_shard} shards"
    )
    return model
