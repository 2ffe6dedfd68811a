"""What several settings must fulfil together, for model, attention, loss and parallelism."""

from collections.abc import Iterator
from unittest import mock

import torch

from titan_lowprec.ops.attention.api import resolve_impl
from titan_lowprec.titan.config_types import DEGREES, MODEL, Job, Problem, Rule
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.specs import attention_spec


def attention_options(job: Job) -> Iterator[Problem]:
    """What ``AttentionSpec`` refuses, in terms of the job file."""
    try:
        attention_spec(job.config)
    except ValueError as error:
        section = job.config.attention
        named = [name for name in vars(section) if name in str(error)]
        values = {name: getattr(section, name) for name in named}
        keys = " and ".join(f"attention.{name}" for name in named) or "attention"
        yield Problem(keys, "describe an attention that exists", values, str(error))


def attention_impl(job: Job) -> Iterator[Problem]:
    """Kernels that a named implementation does not have."""
    section = job.config.attention
    if section.impl != "triton":
        return
    remedy = "set attention.impl to auto or reference"
    if job.device_type != "cuda":
        needs = f"be auto or reference on {job.device_type}"
        yield Problem("attention.impl", needs, "triton", remedy)
        return
    try:
        impl_on_hopper(job.config, job.model_args.head_dim)
    except ValueError as error:
        yield Problem("attention.impl", "be one that can do this attention", "triton", str(error))


def impl_on_hopper(config: MergedJobConfig, head_dim: int) -> str:
    """What ``attention.impl`` becomes on an sm90 GPU, one that need not be here or be woken.

    Raises:
        ValueError: The implementation that the job names cannot do its attention.
    """
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        return resolve_impl(
            config.attention.impl,
            device=torch.device("cuda"),
            spec=attention_spec(config),
            head_dim=head_dim,
        )


def head_dim(job: Job) -> Iterator[Problem]:
    """Head dimensions that the formats can hold."""
    size = job.model_args.head_dim
    if size % 16 != 0:
        yield Problem(
            "model.flavor",
            f"have a head dimension that is a multiple of 16, {job.config.model.flavor} has {size}",
            job.config.model.flavor,
            "choose another flavor",
        )
    section = job.config.attention
    if section.rotate and section.recipe != "bf16" and size & (size - 1):
        yield Problem(
            "attention.rotate",
            f"be false for a head dimension of {size}: a Hadamard rotation needs a power of two",
            True,
            "set attention.rotate = false or choose another model.flavor",
        )


def named_fault(job: Job) -> Iterator[Problem]:
    """The fault of D where no gradient is quantised, so that an arm of a sweep would be no arm."""
    section = job.config.attention
    if section.delta_gradient != "as_in_dp" and section.recipe in ("fp32", "bf16"):
        yield Problem(
            "attention.delta_gradient",
            f"be as_in_dp with attention.recipe={section.recipe}, which quantises no gradient",
            section.delta_gradient,
            "remove the fault or choose a quantised recipe",
        )


def high_precision_layers(job: Job) -> Iterator[Problem]:
    """Layer numbers of the model."""
    layers = job.model_args.n_layers
    listed = job.config.attention.high_precision_layers
    for layer in listed:
        if layer and not (layer.isascii() and layer.isdigit() and int(layer) < layers):
            yield Problem(
                "attention.high_precision_layers",
                f"name layers 0 to {layers - 1} of {job.config.model.flavor}",
                layer,
                'list numbers in quotes, for example ["0"]',
            )
    if len(set(listed)) != len(listed):
        yield Problem(
            "attention.high_precision_layers", "name a layer once", listed, "remove the repetition"
        )


def tied_embeddings(job: Job) -> Iterator[Problem]:
    """Sharing a parameter between embedding and head."""
    if job.config.model.tie_embeddings:
        yield Problem(
            "model.tie_embeddings",
            "be false: FSDP2 of torch 2.12 and later cannot shard a parameter of two modules",
            True,
            "set it to false; tied Hugging Face weights load, and the head starts as a copy",
        )


def refused_parallelism(job: Job) -> Iterator[Problem]:
    """Ways to spread the model that packed attention does not know."""
    reasons = {
        "pipeline_parallel_degree": "be 1: TorchTitan does not pass the packed rows' metadata "
        "(cu_seqlens, positions) to later pipeline stages",
        "context_parallel_degree": "be 1: packed attention has no keys of other ranks",
        "expert_parallel_degree": "be 1: the model has no experts",
        "expert_tensor_parallel_degree": "be 1: the model has no experts",
    }
    for name, needs in reasons.items():
        value = getattr(job.config.parallelism, name)
        if value > 1:
            remedy = "use data_parallel_shard_degree or tensor_parallel_degree instead"
            yield Problem(f"parallelism.{name}", needs, value, remedy)


def world_size(job: Job) -> Iterator[Problem]:
    """The product of all degrees."""
    section = job.config.parallelism
    fixed = section.data_parallel_replicate_degree * section.tensor_parallel_degree
    fixed *= section.pipeline_parallel_degree * section.context_parallel_degree
    shard = section.data_parallel_shard_degree
    if shard == -1 and job.world_size % fixed == 0:
        return
    product = fixed if shard == -1 else fixed * shard
    if product != job.world_size:
        word = "divide" if shard == -1 else "have a product equal to"
        yield Problem(
            "parallelism.*_degree",
            f"{word} the number of processes, {job.world_size}",
            product,
            f"start {product} processes, or set parallelism.data_parallel_shard_degree = -1 and "
            "degrees that divide it",
        )


def one_process(job: Job) -> Iterator[Problem]:
    """Direct casts where FSDP2 has something to do."""
    if job.config.parallelism.one_process != "direct":
        return
    reason = f"with {job.world_size} processes" if job.world_size > 1 else ""
    if job.config.training.enable_cpu_offload:
        reason = "with training.enable_cpu_offload"
    if job.config.model.name != "llama3_lowprec":
        reason = f"for {job.config.model.name}, which FSDP2 shards on one process too"
    if reason:
        yield Problem("parallelism.one_process", f"not be direct {reason}", "direct", "use auto")


def tensor_parallel(job: Job) -> Iterator[Problem]:
    """What tensor parallelism splits."""
    degree = job.config.parallelism.tensor_parallel_degree
    sizes = {
        "n_heads": job.model_args.n_heads,
        "n_kv_heads": job.model_args.n_kv_heads or job.model_args.n_heads,
        "training.seq_len": job.config.training.seq_len,
    }
    for name, size in sizes.items():
        if size % degree:
            yield Problem(
                "parallelism.tensor_parallel_degree",
                f"divide {name}={size}",
                degree,
                f"use one of {[d for d in range(1, degree) if size % d == 0]}",
            )


def divided_vocabulary(job: Job) -> Iterator[Problem]:
    """Embedding and head, whose rows tensor parallelism and FSDP divide one after the other."""
    section = job.config.parallelism
    degree, shards = section.tensor_parallel_degree, section.data_parallel_shard_degree
    if shards == -1:
        shards = job.world_size // (degree * section.data_parallel_replicate_degree)
    vocabulary = job.model_args.vocab_size
    if degree > 1 and shards > 1 and vocabulary % (degree * shards):
        yield Problem(
            "parallelism.tensor_parallel_degree",
            f"divide vocab_size={vocabulary} together with {shards} FSDP shards: PyTorch cuts "
            "rows twice into equal parts only",
            degree,
            "use degrees whose product divides it, or data_parallel_replicate_degree for FSDP's",
        )


def chunked_loss(job: Job) -> Iterator[Problem]:
    """A head that lives on one pipeline stage, while its labels and rows are elsewhere."""
    degree = job.config.parallelism.pipeline_parallel_degree
    if job.config.loss.impl == "linear_chunked" and degree > 1:
        yield Problem(
            "loss.impl",
            f"not be linear_chunked with parallelism.pipeline_parallel_degree={degree}: "
            "the loss is computed in the head, and a pipeline schedule computes it outside",
            "linear_chunked",
            "set loss.impl = logits_fp32",
        )


def logits_only_options(job: Job) -> Iterator[Problem]:
    """Options that the bf16 ablation does not have."""
    section = job.config.loss
    for name in ("z_loss", "softcap"):
        value = getattr(section, name)
        if section.impl == "logits_bf16" and value:
            yield Problem(
                f"loss.{name}",
                "be 0 with loss.impl=logits_bf16, which is plain cross-entropy",
                value,
                "set it to 0 or loss.impl to logits_fp32",
            )


def converters(job: Job) -> Iterator[Problem]:
    """Names that TorchTitan would look up with a bare KeyError."""
    from torchtitan.protocols.model_converter import _registry_model_converter_cls as known

    for name in job.config.model.converters:
        if name and name not in known:
            yield Problem(
                "model.converters",
                f"name registered converters, {sorted(known)}",
                name,
                "correct the name, or import its module in experimental.custom_import",
            )


MODEL_RULES = (
    Rule(("attention",), attention_options),
    Rule((*MODEL, "attention"), attention_impl),
    Rule(("attention.delta_gradient", "attention.recipe"), named_fault),
    Rule((*MODEL, "attention.rotate", "attention.recipe"), head_dim),
    Rule((*MODEL, "attention.high_precision_layers"), high_precision_layers),
    Rule(("model.tie_embeddings",), tied_embeddings),
    Rule(DEGREES, refused_parallelism),
    Rule(DEGREES, world_size),
    Rule(
        ("parallelism.one_process", "training.enable_cpu_offload", "model.name"),
        one_process,
    ),
    Rule((*MODEL, "training.seq_len", *DEGREES), tensor_parallel),
    Rule((*MODEL, *DEGREES), divided_vocabulary),
    Rule(("loss.impl", *DEGREES), chunked_loss),
    Rule(("loss.impl", "loss.z_loss", "loss.softcap"), logits_only_options),
    Rule(("model.converters",), converters),
)
