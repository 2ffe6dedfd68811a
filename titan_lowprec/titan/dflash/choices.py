"""``auto`` in ``[dflash]``, resolved once and said in the log."""

import torch
from torchtitan.tools.logging import logger

from titan_lowprec.models.dflash.attention import Impl
from titan_lowprec.ops.cross_entropy.api import Impl as HeadImpl
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.specs import resolve_head_impl


def attention_on(job_config: MergedJobConfig, device_type: str) -> Impl:
    """The draft's attention on a kind of device."""
    wanted = job_config.dflash.attention
    if wanted != "auto":
        return wanted
    bf16 = job_config.training.mixed_precision_param == "bfloat16"
    return "flex_bf16" if bf16 and device_type == "cuda" else "reference"


def attention_choice(job_config: MergedJobConfig) -> Impl:
    """The draft's attention on this machine."""
    from torchtitan.tools.utils import device_type

    impl = attention_on(job_config, device_type)
    logger.info(f"dflash.attention={job_config.dflash.attention} is {impl} on {device_type}")
    return impl


def head_choice(job_config: MergedJobConfig) -> HeadImpl:
    """The chunked head on this machine: its kernels need bf16 on Hopper."""
    from torchtitan.tools.utils import device_type

    bf16 = job_config.training.mixed_precision_param == "bfloat16"
    if job_config.loss.impl != "linear_chunked" or device_type != "cuda" or not bf16:
        return "reference"
    assert torch.cuda.is_available()
    return resolve_head_impl()
