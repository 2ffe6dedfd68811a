"""What ``[graph]`` cannot be combined with, refused before a device is touched, with the reason."""

import os
from collections.abc import Iterator

from titan_lowprec.titan.config_rules import impl_on_hopper
from titan_lowprec.titan.config_types import DEGREES, MODEL, Job, Problem, Rule

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def graph_device(job: Job) -> Iterator[Problem]:
    """A device that has graphs."""
    if job.config.graph.enable and job.device_type != "cuda":
        needs = f"be false on {job.device_type}: CUDA graphs need a CUDA device"
        yield Problem("graph.enable", needs, True, "set it to false")


def graph_parallelism(job: Job) -> Iterator[Problem]:
    """Ways to spread the model that were never captured, or cannot be."""
    if not job.config.graph.enable:
        return
    reasons = {
        "pipeline_parallel_degree": "its schedule exchanges microbatches between processes in the "
        "middle of what would be captured",
        "tensor_parallel_degree": "its collectives inside the blocks were not proven under capture",
        "context_parallel_degree": "its exchange of keys was not proven under capture",
        "expert_parallel_degree": "the tokens of an expert, and with them shapes, change",
    }
    for name, reason in reasons.items():
        degree = getattr(job.config.parallelism, name)
        if degree > 1:
            needs = f"be false with parallelism.{name}={degree}: {reason}"
            yield Problem("graph.enable", needs, True, "set it to false, or shard with FSDP")


def graph_capacity(job: Job) -> Iterator[Problem]:
    """Room for documents, the same decision on every process."""
    section, most = job.config.graph, job.config.data.max_documents
    if not section.enable or section.max_documents == 0:
        return
    if section.max_documents > most:
        yield Problem(
            "graph.max_documents",
            f"be at most data.max_documents={most}, which no row exceeds",
            section.max_documents,
            "set it to 0",
        )
    elif section.max_documents < most and job.world_size > 1:
        yield Problem(
            "graph.max_documents",
            f"be 0 with {job.world_size} processes: NCCL needs a collective captured on every "
            "process or on none, and a row over capacity is known to its own process only",
            section.max_documents,
            "set it to 0, or lower data.max_documents",
        )


def graph_allocator(job: Job) -> Iterator[Problem]:
    """Memory that NCCL's captured kernels can rely on."""
    if not job.config.graph.enable:
        return
    for name in ALLOCATOR_VARIABLES:
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            needs = (
                f"be false with {name}={value}: NCCL inside a graph on expandable segments ends in "
                "illegal memory accesses (pytorch#158029)"
            )
            yield Problem("graph.enable", needs, True, f"set it to false, or unset {name}")


def graph_random_state(job: Job) -> Iterator[Problem]:
    """Checkpointed blocks that would read the random generator during the capture."""
    section = job.config.activation_checkpoint
    checkpointed = section.mode in ("full", "selective")
    if job.config.graph.enable and checkpointed and section.preserve_rng_state:
        needs = (
            f"be false with graph.enable and activation_checkpoint.mode={section.mode}: saving the "
            "generator's state is not allowed during a capture, and this model draws no numbers"
        )
        yield Problem("activation_checkpoint.preserve_rng_state", needs, True, "set it to false")


def graph_host_work(job: Job) -> Iterator[Problem]:
    """Work of the host inside the step, which a replay would leave out."""
    config = job.config
    if not config.graph.enable:
        return
    if config.training.enable_cpu_offload:
        needs = "be false with graph.enable: gradients are copied to the host inside the backward"
        yield Problem("training.enable_cpu_offload", needs, True, "set one of them to false")
    if config.attention.impl == "reference":
        needs = "not be reference with graph.enable: it reads document offsets on the host"
        yield Problem("attention.impl", needs, "reference", "set it to auto or triton")
    elif attention_is_reference(job):
        needs = (
            f"be false with attention.recipe={config.attention.recipe} and {config.model.flavor}'s "
            "heads: no kernel takes them, and the reference reads document offsets on the host"
        )
        yield Problem("graph.enable", needs, True, "set it to false")
    if config.quantize.linear.float8.enable_fsdp_float8_all_gather:
        needs = "be false with graph.enable: its all-gather was not proven under capture"
        key = "quantize.linear.float8.enable_fsdp_float8_all_gather"
        yield Problem(key, needs, True, "set it to false")


def attention_is_reference(job: Job) -> bool:
    """Whether even a Hopper GPU would run attention as the PyTorch reference."""
    head_dim = getattr(job.model_args, "head_dim", None)
    no_target = job.config.model.name == "dflash" and job.config.dflash.features == "offline"
    if head_dim is None or no_target:
        return False
    try:
        return impl_on_hopper(job.config, head_dim) == "reference"
    except ValueError:  # a named implementation that cannot: another rule's
        return False


GRAPH_RULES = (
    Rule(("graph.enable",), graph_device),
    Rule(("graph.enable", *DEGREES), graph_parallelism),
    Rule(("graph", "data.max_documents"), graph_capacity),
    Rule(("graph.enable",), graph_allocator),
    Rule(("graph.enable", "activation_checkpoint"), graph_random_state),
    Rule(
        (
            *MODEL,
            "graph.enable",
            "training.enable_cpu_offload",
            "attention",
            "quantize",
            "dflash.features",
        ),
        graph_host_work,
    ),
)
