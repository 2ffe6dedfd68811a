"""What several settings must fulfil together, for batches, data, checkpoints and metrics."""

import glob
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import torchtitan.config.job_config as stock

from titan_lowprec.data.bundled import resolve_path
from titan_lowprec.titan.activation import EXCLUSIVE, ops_of
from titan_lowprec.titan.config_types import DEGREES, MODEL, Job, Problem, Rule


def global_batch(job: Job) -> Iterator[Problem]:
    """Gradient accumulation in whole microbatches."""
    training, degree = job.config.training, job.data_parallel_degree
    size = training.global_batch_size
    if degree is None or size < 0:
        return
    unit = training.local_batch_size * degree
    if size % unit == 0:
        return
    nearest = [value for value in (size // unit * unit, (size // unit + 1) * unit) if value]
    yield Problem(
        "training.global_batch_size",
        f"be a multiple of {unit} = training.local_batch_size {training.local_batch_size} x "
        f"{degree} data-parallel ranks",
        size,
        "use " + " or ".join(map(str, nearest)),
    )


def schedule(job: Job) -> Iterator[Problem]:
    """A decay that would go on below zero."""
    total, steps = job.config.lr_scheduler.total_steps, job.config.training.steps
    if total is not None and total < steps:
        yield Problem(
            "lr_scheduler.total_steps",
            f"be at least training.steps={steps}: the decay would go on to negative rates",
            total,
            "raise it or leave it out",
        )


def stock_data_keys(job: Job) -> Iterator[Problem]:
    """TorchTitan's own data settings, which nothing here reads."""
    unused = {
        ("training", "dataset"): "data.source, data.paths and data.hf_name",
        ("training", "dataset_path"): "data.paths",
        ("validation", "dataset"): "data.validation_paths",
        ("validation", "dataset_path"): "data.validation_paths",
        ("model", "tokenizer_path"): "data.tokenizer",
    }
    defaults = stock.JobConfig()
    for (section, name), ours in unused.items():
        value = getattr(getattr(job.config, section), name)
        if value != getattr(getattr(defaults, section), name):
            yield Problem(
                f"{section}.{name}", "not be set: it is not read", value, f"set {ours} instead"
            )


def validation_rows(job: Job) -> Iterator[Problem]:
    """Validation runs the model at the length that it is trained for."""
    section, training = job.config.validation, job.config.training
    if section.enable and section.seq_len != training.seq_len:
        yield Problem(
            "validation.seq_len",
            f"equal training.seq_len={training.seq_len}: both are packed alike",
            section.seq_len,
            f"set validation.seq_len = {training.seq_len}",
        )


def data_source(job: Job) -> Iterator[Problem]:
    """Documents that exist."""
    data = job.config.data
    if data.source == "hf":
        if not data.hf_name:
            needs = "name a dataset with data.source=hf"
            remedy = 'for example set it to "HuggingFaceFW/fineweb-edu"'
            yield Problem("data.hf_name", needs, data.hf_name, remedy)
    else:
        yield from _missing_files("data.paths", data.paths)
    if job.config.validation.enable:
        yield from _missing_files("data.validation_paths", data.validation_paths)


def _missing_files(key: str, paths: list[str]) -> Iterator[Problem]:
    if not paths:
        yield Problem(key, "name at least one file", paths, 'for example ["bundled:train"]')
    for path in paths:
        try:
            if not path or glob.glob(resolve_path(path), recursive=True):
                continue
            yield Problem(key, "match existing files", path, "correct the path")
        except ValueError as error:
            yield Problem(key, "name files or a bundled text", path, str(error))


def tokenizer(job: Job) -> Iterator[Problem]:
    """A tokenizer whose ids the embedding has."""
    name = job.config.data.tokenizer
    needs = "be bundled:tokenizer or a folder with tokenizer.json"
    try:
        path = Path(resolve_path(name)) / "tokenizer.json"
    except ValueError as error:
        yield Problem("data.tokenizer", needs, name, str(error))
        return
    if not path.is_file():
        yield Problem("data.tokenizer", needs, name, "correct the path")
        return
    entries = vocabulary_entries(path)
    vocabulary = getattr(job.model_args, "vocab_size", entries)
    if entries > vocabulary:
        yield Problem(
            "data.tokenizer",
            f"have at most vocab_size={vocabulary} entries for {job.config.model.flavor}, "
            f"{path} has {entries}",
            name,
            "choose a model.flavor with a larger vocabulary, or another tokenizer",
        )


def vocabulary_entries(path: Path) -> int:
    """One more than the largest id of a ``tokenizer.json``."""
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (token["id"] for token in content.get("added_tokens", []))
    return max([*ids, *added], default=-1) + 1


def checkpoints(job: Job) -> Iterator[Problem]:
    """Checkpoints from which a run can go on."""
    section = job.config.checkpoint
    if not section.enable:
        return
    saves = not (section.load_only or section.create_seed_checkpoint)
    if saves and section.last_save_model_only and not section.last_save_in_hf:
        yield Problem(
            "checkpoint.last_save_model_only",
            "be false: a finished run could not be continued from its last checkpoint",
            True,
            "set it to false, or checkpoint.last_save_in_hf to true for an export at the end",
        )
    if section.last_save_in_hf and not section.last_save_model_only:
        needs = "be true with checkpoint.last_save_in_hf, whose format holds the model only"
        yield Problem("checkpoint.last_save_model_only", needs, False, "set it to true")
    if section.keep_latest_k == 1:
        needs = "not be 1: the latest checkpoint may be half written when the run ends"
        yield Problem("checkpoint.keep_latest_k", needs, 1, "use 2 or more, or 0 to keep all")


def initial_weights(job: Job) -> Iterator[Problem]:
    """Weights to start from that exist."""
    section = job.config.checkpoint
    path = section.initial_load_path
    if path is not None and not section.enable:
        needs = "be true with checkpoint.initial_load_path, which is ignored otherwise"
        yield Problem("checkpoint.enable", needs, False, "set it to true")
    if path is not None and not Path(path).is_dir():
        needs = "be the folder of a checkpoint, its step included"
        yield Problem("checkpoint.initial_load_path", needs, path, "correct the path")
    if not section.initial_load_in_hf:
        return
    if not section.initial_load_model_only:
        needs = "be true with checkpoint.initial_load_in_hf, whose format holds the model only"
        yield Problem("checkpoint.initial_load_model_only", needs, False, "set it to true")
    folder = Path(path if path is not None else job.config.model.hf_assets_path)
    if not any(folder.glob("*.safetensors")):
        key = "model.hf_assets_path" if path is None else "checkpoint.initial_load_path"
        needs = "hold *.safetensors with checkpoint.initial_load_in_hf"
        yield Problem(key, needs, str(folder), "name the folder of Hugging Face weights")


def activation_checkpointing(job: Job) -> Iterator[Problem]:
    """Options that TorchTitan would refuse after the model is built."""
    section, compiled = job.config.activation_checkpoint, job.config.compile
    option = section.selective_ac_option
    if section.mode == "selective" and not (
        option == "op" or (option.isascii() and option.isdigit() and int(option) > 0)
    ):
        needs = 'be "op" or a number of layers in quotes'
        yield Problem("activation_checkpoint.selective_ac_option", needs, option, 'use "op"')
    for name in section.save_ops:
        try:
            ops_of(name)
        except ValueError as error:
            needs = "name results to keep"
            yield Problem("activation_checkpoint.save_ops", needs, name, str(error))
    for one, other in EXCLUSIVE:
        if {one, other} <= set(section.save_ops):
            needs = f"not hold both {one} and {other}"
            key = "activation_checkpoint.save_ops"
            yield Problem(key, needs, section.save_ops, "remove one of them")
    if section.mode == "memory_budget" and not (compiled.enable and "model" in compiled.components):
        needs = "not be memory_budget without compile.enable: the compiler's partitioner does it"
        yield Problem("activation_checkpoint.mode", needs, section.mode, "set compile.enable")


def optimizer(job: Job) -> Iterator[Problem]:
    """Optimizers that TorchTitan 0.2.2 has and that fit the trainer."""
    section = job.config.optimizer
    if section.name not in ("Adam", "AdamW"):
        yield Problem("optimizer.name", "be Adam or AdamW", section.name, "choose one of them")
    if section.early_step_in_backward:
        needs = "be false: a step with non-finite gradients could not be skipped"
        yield Problem("optimizer.early_step_in_backward", needs, True, "set it to false")
    if job.config.training.clip_where == "optimizer" and section.implementation != "fused":
        needs = f"be gradients with optimizer.implementation={section.implementation}"
        yield Problem("training.clip_where", needs, "optimizer", 'set implementation = "fused"')


def outputs(job: Job) -> Iterator[Problem]:
    """Profiles and metrics."""
    profiling, section = job.config.profiling, job.config.metrics
    for name in ("enable_profiling", "enable_memory_snapshot"):
        if getattr(profiling, name) and job.device_type == "cpu":
            needs = "be false on a CPU: TorchTitan 0.2.2 profiles accelerators only"
            yield Problem(f"profiling.{name}", needs, True, "profile on a GPU, or with py-spy")
    if profiling.enable_profiling and job.device_type != "cpu":
        least = profiling.profiler_active + profiling.profiler_warmup
        if profiling.profile_freq < least:
            needs = f"be at least profiler_active + profiler_warmup = {least}"
            yield Problem("profiling.profile_freq", needs, profiling.profile_freq, f"use {least}")
    if section.save_for_all_ranks:
        needs = "be false: figures are global and only rank 0 logs them"
        yield Problem("metrics.save_for_all_ranks", needs, True, "set it to false")
    if section.enable_wandb and importlib.util.find_spec("wandb") is None:
        yield Problem("metrics.enable_wandb", "be false without wandb", True, "pip install wandb")
    if section.health_every > 0:
        if job.config.model.name != "llama3_lowprec":
            needs = f"be 0 for {job.config.model.name}: it measures blocks of llama3_lowprec"
            yield Problem("metrics.health_every", needs, section.health_every, "set it to 0")
        if job.config.parallelism.tensor_parallel_degree > 1:
            needs = "be 0 with tensor parallel: outside of attention a rank has part of a row"
            yield Problem("metrics.health_every", needs, section.health_every, "set it to 0")


def fault_tolerance(job: Job) -> Iterator[Problem]:
    """TorchFT, which needs another trainer."""
    if job.config.fault_tolerance.enable:
        needs = "be false: this trainer does not run under TorchFT"
        yield Problem("fault_tolerance.enable", needs, True, "set it to false")


RUN_RULES = (
    Rule(("training.local_batch_size", "training.global_batch_size", *DEGREES), global_batch),
    Rule(("lr_scheduler.total_steps", "training.steps"), schedule),
    Rule(
        (
            "training.dataset",
            "training.dataset_path",
            "validation.dataset",
            "validation.dataset_path",
            "model.tokenizer_path",
        ),
        stock_data_keys,
    ),
    Rule(("validation.enable", "validation.seq_len", "training.seq_len"), validation_rows),
    Rule(
        (
            "data.source",
            "data.hf_name",
            "data.paths",
            "data.validation_paths",
            "validation.enable",
        ),
        data_source,
    ),
    Rule(("data.tokenizer",), tokenizer),
    Rule(("checkpoint",), checkpoints),
    Rule(("checkpoint", "model.hf_assets_path"), initial_weights),
    Rule(("activation_checkpoint", "compile"), activation_checkpointing),
    Rule(("optimizer", "training.clip_where"), optimizer),
    Rule(("profiling", "metrics", *MODEL, "parallelism.tensor_parallel_degree"), outputs),
    Rule(("fault_tolerance.enable",), fault_tolerance),
)
