"""Resolve recipes and say what each would do: size, memory, schedule, data, attention."""

import glob
import importlib
from pathlib import Path
from typing import Any, cast

import torch
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

from titan_lowprec import _autoload
from titan_lowprec.data.bundled import resolve_path
from titan_lowprec.ops.attention.api import resolve_impl
from titan_lowprec.titan.check_config import ConfigError, check_config
from titan_lowprec.titan.config_rules import impl_on_hopper
from titan_lowprec.titan.dflash.report import draft_rows
from titan_lowprec.titan.estimate import memory_estimate, model_size, rows_per_step
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.recipe_keys import unknown_keys
from titan_lowprec.titan.specs import attention_spec

USAGE = (
    "usage: python -m titan_lowprec.validate RECIPE.toml ... [--world-size N] "
    "[--section.key value ...]"
)
WORLD_SIZE = "--world-size"
GIB = 1024**3


def validate_recipes(args: list[str]) -> int:
    """Check every recipe and print a table for each; an error in one does not stop the others.

    Args:
        args: Recipe files, then ``--world-size N`` (default 1) and overrides as for training.

    Returns:
        0 if all recipes are good, 1 if one is not, 2 for a wrong command line.
    """
    try:
        recipes, world_size, overrides = parse_command(args)
    except ValueError as error:
        print(f"validate: {error}\n{USAGE}")
        return 2
    failed = 0
    for recipe in recipes:
        try:
            rows = describe(load_recipe(recipe, overrides), world_size=world_size)
        except (Exception, SystemExit) as error:  # whatever is wrong with it, try the next one
            failed += 1
            print(f"{recipe}: ERROR\n{indent(error_text(error))}\n")
            continue
        print(f"{recipe}: ok\n{indent(table(rows))}\n")
    print(f"{len(recipes) - failed} of {len(recipes)} recipes are good")
    return 1 if failed else 0


def parse_command(args: list[str]) -> tuple[list[str], int, list[str]]:
    """Split a command line into recipes, world size and overrides.

    Raises:
        ValueError: No recipe is named, or the world size is no positive number.
    """
    world_size, rest = 1, []
    arguments = iter(args)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag != WORLD_SIZE:
            rest.append(argument)
            continue
        text = value if equals else next(arguments, "")
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise ValueError(f"{WORLD_SIZE} must be a positive number, got {text!r}")
        world_size = int(text)
    first_flag = next((i for i, argument in enumerate(rest) if argument.startswith("-")), len(rest))
    recipes, overrides = rest[:first_flag], rest[first_flag:]
    if not recipes:
        raise ValueError("name at least one recipe, before any override")
    return recipes, world_size, overrides


def load_recipe(recipe: str, overrides: list[str]) -> MergedJobConfig:
    """Parse a recipe as training would, and import what it registers.

    Raises:
        ValueError: There is no such file.
        ConfigError: It has keys that do not exist; all are named.
    """
    if not Path(recipe).is_file():
        raise ValueError(f"the recipe must be a file, got {recipe!r}; correct the path")
    args = _autoload.normalize_config_flag(["--job.config", recipe, *overrides])
    try:
        config = cast(MergedJobConfig, ConfigManager().parse_args(args))
    except ValueError as error:
        if unknown := unknown_keys(recipe, args):  # TorchTitan names one section, and no neighbour
            raise ConfigError("\n  ".join(["the recipe has unknown keys:", *unknown])) from error
        raise
    for module in ("titan_lowprec.titan.register", config.experimental.custom_import):
        if module:
            importlib.import_module(module)
    return config


def describe(config: MergedJobConfig, *, world_size: int) -> list[tuple[str, str]]:
    """Check a configuration and resolve what it leaves open.

    Returns:
        Rows of the table, name and text.

    Raises:
        ConfigError: The configuration cannot work on CUDA devices.
    """
    check_config(config, device_type="cuda", world_size=world_size)
    if config.model.name == "dflash":
        rows = rows_per_step(config, world_size=world_size)
        model_rows = draft_rows(config, world_size=world_size, rows=rows)
    else:
        model_rows = [*size_rows(config, world_size), *memory_rows(config, world_size)]
    return [
        *model_rows,
        ("learning rate", schedule_text(config)),
        ("data", data_text(config, config.data.paths)),
        *validation_rows(config),
        *attention_rows(config),
    ]


def size_rows(config: MergedJobConfig, world_size: int) -> list[tuple[str, str]]:
    """Parameters and tokens."""
    size = model_size(config)
    training = config.training
    rows = rows_per_step(config, world_size=world_size)
    tokens = rows * training.seq_len
    return [
        ("model", f"{config.model.name} {config.model.flavor}"),
        (
            "parameters",
            f"{size.parameters:,} ({size.parameters - size.embedding:,} without the embedding)",
        ),
        ("tokens per step", f"{tokens:,} ({rows} rows of {training.seq_len:,})"),
        ("tokens in total", f"{tokens * training.steps:,} ({training.steps:,} steps)"),
    ]


def memory_rows(config: MergedJobConfig, world_size: int) -> list[tuple[str, str]]:
    """The estimate and its parts; ``estimate.memory_estimate`` states the formula."""
    memory = memory_estimate(config, world_size=world_size)
    parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")
    text = ", ".join(f"{name} {getattr(memory, name) / GIB:.2f}" for name in parts)
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    return [("memory per GPU", f"about {memory.total / GIB:.2f} GiB, {processes} ({text})")]


def schedule_text(config: MergedJobConfig) -> str:
    """Peak, warm-up and decay, as TorchTitan adjusts them to the number of steps."""
    section = config.lr_scheduler
    total = section.total_steps if section.total_steps is not None else config.training.steps
    warmup = min(section.warmup_steps, total)
    decay = total - warmup
    if section.decay_ratio is not None:
        decay = min(round(total * section.decay_ratio), decay)
    text = (
        f"peak {config.optimizer.lr:g}; {warmup} steps of warm-up, {total - warmup - decay} at the "
        f"peak, {decay} of {section.decay_type} decay to {section.min_lr_factor:g} of it"
    )
    if warmup < section.warmup_steps:
        text += f"; lr_scheduler.warmup_steps={section.warmup_steps} is cut to {total} steps"
    return text


def data_text(config: MergedJobConfig, paths: list[str]) -> str:
    """Where documents come from, and what is there."""
    data = config.data
    if data.source == "hf":
        name = " ".join(part for part in (data.hf_name, data.hf_config, data.hf_split) if part)
        here = Path(data.hf_name).is_dir()
        return f"Hugging Face {name}: {'local folder' if here else 'on the hub, not looked up'}"
    return "; ".join(file_text(path) for path in paths)


def file_text(path: str) -> str:
    """A path of the recipe with number and size of its files."""
    files = [Path(name) for name in glob.glob(resolve_path(path), recursive=True)]
    inside = [file for name in files for file in ([name] if name.is_file() else name.rglob("*"))]
    size = sum(file.stat().st_size for file in inside if file.is_file())
    count = sum(file.is_file() for file in inside)
    return f"{path} ({count} file{'' if count == 1 else 's'}, {size / 1e6:,.1f} MB)"


def validation_rows(config: MergedJobConfig) -> list[tuple[str, str]]:
    """The fixed validation set, where there is one."""
    section = config.validation
    if not section.enable:
        return [("validation", "off")]
    files = "; ".join(file_text(path) for path in config.data.validation_paths)
    steps = "all" if section.steps == -1 else str(section.steps)
    return [("validation", f"every {section.freq} steps, {steps} batches of {files}")]


def attention_rows(config: MergedJobConfig) -> list[tuple[str, str]]:
    """Recipe, and the implementation on the devices that people use."""
    section = config.attention
    recipe = section.recipe
    if section.high_precision_layers:
        recipe += f", bf16 in layers {', '.join(section.high_precision_layers)}"
    if section.delta_gradient != "as_in_dp":
        recipe += f" with a fault, delta_gradient={section.delta_gradient}"
    args: Any = get_train_spec(config.model.name).model_args[config.model.flavor]
    return [
        ("attention", f"{recipe}; head dimension {args.head_dim}"),
        *((f"  on {name}", text) for name, text in implementations(config, args.head_dim).items()),
    ]


def implementations(config: MergedJobConfig, head_dim: int) -> dict[str, str]:
    """What ``attention.impl`` becomes on a CPU and on a Hopper GPU, or why it is refused there."""
    try:
        on_cpu = resolve_impl(
            config.attention.impl,
            device=torch.device("cpu"),
            spec=attention_spec(config),
            head_dim=head_dim,
        )
    except ValueError as error:
        on_cpu = f"refused: {error}"
    return {"CPU": on_cpu, "sm90": impl_on_hopper(config, head_dim)}


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def indent(text: str) -> str:
    """Text below a recipe's name."""
    return "\n".join(f"  {line}" for line in text.splitlines())


def error_text(error: BaseException) -> str:
    """What to print of an exception; the command line's parser has printed its own."""
    if isinstance(error, SystemExit):
        return f"the command line does not fit the configuration (status {error.code}), see above"
    return f"{type(error).__name__}: {error}"
