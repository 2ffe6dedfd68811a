"""What ``model.converters`` did to the model's linear layers."""

import re
from collections import Counter

import torch.nn as nn
from torchtitan.tools.logging import logger

from titan_lowprec.titan.check_config import ConfigError
from titan_lowprec.titan.llama3.model import LowprecHead
from titan_lowprec.titan.merged_config import MergedJobConfig


def check_conversion(model: nn.Module, job_config: MergedJobConfig) -> None:
    """Log how many linear layers each kind has; refuse converters that changed none.

    Raises:
        ConfigError: Converters are configured and every linear layer is as it was.
    """
    converters = job_config.model.converters
    if not converters:
        return
    kinds = Counter(type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear))
    unchanged = kinds[nn.Linear.__name__] + kinds[LowprecHead.__name__]
    if kinds.total() == unchanged:
        raise ConfigError(
            f"model.converters: must convert at least one layer, got {converters}, which left all "
            f"{unchanged} linear layers as they were; check the filter_fqns of [quantize], or "
            "remove the converter"
        )
    logger.info(
        f"model.converters={converters}: {kinds.total() - unchanged} linear layers converted, "
        f"{unchanged} kept ({dict(kinds)}); kept: {', '.join(kept_names(model)) or 'none'}"
    )


def kept_names(model: nn.Module) -> list[str]:
    """Linear layers that no converter changed, the layers of all blocks under one name."""
    kept = {
        re.sub(r"\blayers\.\d+\.", "layers.*.", name)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, LowprecHead)
    }
    return sorted(kept)
