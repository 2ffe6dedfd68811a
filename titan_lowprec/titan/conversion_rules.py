"""Low-precision linear layers that the hardware or the model cannot have, refused at start."""

import importlib
import importlib.util
from collections.abc import Iterator

import torch

from titan_lowprec.titan.config_types import Job, Problem, Rule

FLOAT8 = "quantize.linear.float8"
MX = "quantize.linear.mx"
FP8_CAPABILITY = (8, 9)
ROWWISE_CAPABILITY = (9, 0)
MX_CAPABILITY = (10, 0)


def capability() -> tuple[int, int] | None:
    """Of the GPU here, ``None`` without one: a job may be checked where it does not run."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def float8_device(job: Job) -> Iterator[Problem]:
    """FP8 products that the device has."""
    if FLOAT8 not in job.config.model.converters:
        return
    section = job.config.quantize.linear.float8
    if importlib.util.find_spec("torchao") is None:
        yield Problem("model.converters", "not name it without torchao", FLOAT8, "install torchao")
    if job.device_type != "cuda":
        if not section.emulate or section.recipe_name is not None or job.config.compile.enable:
            yield Problem(
                "model.converters",
                f"not name it on {job.device_type}, which has no FP8 products, unless "
                f"{FLOAT8}.emulate is true, without recipe_name and compile",
                FLOAT8,
                "remove it",
            )
        return
    least = FP8_CAPABILITY if section.recipe_name in (None, "tensorwise") else ROWWISE_CAPABILITY
    found = capability()
    if found is not None and found < least and not section.emulate:
        yield Problem(
            "model.converters",
            f"not name it with recipe_name={section.recipe_name} on a GPU of compute capability "
            f"{found}: it needs {least}",
            FLOAT8,
            "remove it, or use a newer GPU",
        )


def float8_all_gather(job: Job) -> Iterator[Problem]:
    """FP8 all-gathers where TorchTitan 0.2.2 would leave them out or stop."""
    section = job.config.quantize.linear.float8
    if FLOAT8 not in job.config.model.converters:
        return
    gathers = section.enable_fsdp_float8_all_gather
    key = f"{FLOAT8}.enable_fsdp_float8_all_gather"
    if gathers and section.recipe_name is not None:
        needs = f"be false with recipe_name={section.recipe_name}"
        remedy = "leave recipe_name out, which is tensorwise too" + (
            "" if section.recipe_name == "tensorwise" else ", or set this to false"
        )
        yield Problem(key, needs, True, remedy)
    elif gathers and job.world_size == 1:
        needs = "be false with one process, which gathers nothing"
        yield Problem(key, needs, True, "set it to false")
    if section.precompute_float8_dynamic_scale_for_fsdp and not gathers:
        yield Problem(
            f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp",
            f"be false without {key}, whose scales it computes",
            True,
            "set it to false",
        )


def float8_head(job: Job) -> Iterator[Problem]:
    """The head that computes the loss stays what it is."""
    if FLOAT8 not in job.config.model.converters or job.config.loss.impl != "linear_chunked":
        return
    filters = job.config.quantize.linear.float8.filter_fqns
    if not any(name in "output" for name in filters):
        yield Problem(
            f"{FLOAT8}.filter_fqns",
            "leave out the head with loss.impl=linear_chunked, which multiplies by it in chunks",
            filters,
            'add "output"',
        )


def mx_device(job: Job) -> Iterator[Problem]:
    """MXFP8 products, and a torchao in which TorchTitan's converter finds what it imports."""
    if MX not in job.config.model.converters:
        return
    found = capability()
    if job.device_type != "cuda" or (found is not None and found < MX_CAPABILITY):
        where = job.device_type if job.device_type != "cuda" else f"compute capability {found}"
        yield Problem(
            "model.converters",
            f"not name it on {where}: MXFP8 products need Blackwell, {MX_CAPABILITY}",
            MX,
            f"use {FLOAT8} with recipe_name = rowwise on Hopper",
        )
    elif not has_mx_config():
        yield Problem(
            "model.converters",
            "not name it with this torchao: TorchTitan 0.2.2 imports MXLinearConfig, which torchao "
            "had up to 0.16",
            MX,
            f"install torchao 0.16 with torch 2.10, or use {FLOAT8}",
        )


def has_mx_config() -> bool:
    """Whether torchao still has the class that TorchTitan's converter imports."""
    try:
        module = importlib.import_module("torchao.prototype.mx_formats.config")
    except ImportError:
        return False
    return hasattr(module, "MXLinearConfig")


CONVERSION_RULES = (
    Rule(("model.converters", "quantize", "compile.enable"), float8_device),
    Rule(("model.converters", "quantize"), float8_all_gather),
    Rule(("model.converters", "quantize", "loss.impl"), float8_head),
    Rule(("model.converters",), mx_device),
)
