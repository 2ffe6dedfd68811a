"""Refuse a job configuration that cannot work, before a device is touched."""

import os
from collections.abc import Iterator
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from titan_lowprec.titan.config_ranges import range_problems
from titan_lowprec.titan.config_rules import MODEL_RULES
from titan_lowprec.titan.config_run_rules import RUN_RULES
from titan_lowprec.titan.config_types import Job, Problem, type_problems
from titan_lowprec.titan.conversion_rules import CONVERSION_RULES
from titan_lowprec.titan.dflash.rules import DRAFT_RULES
from titan_lowprec.titan.graph_rules import GRAPH_RULES

SECTIONS = ("attention", "loss", "data", "dflash")


class ConfigError(ValueError):
    """A job configuration with problems; the message lists all of them."""


def launched_world_size() -> int:
    """Processes of the job, as its launcher says.

    Raises:
        ConfigError: There was no launcher.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is None:
        raise ConfigError(
            "WORLD_SIZE: must be set by a launcher, is missing; start with `torchrun -m "
            "torchtitan.train` or, for one process, `python -m titan_lowprec.train`"
        )
    return int(size)


def check_config(job_config: JobConfig, *, device_type: str, world_size: int) -> None:
    """Check types, ranges and combinations of a merged job configuration.

    Args:
        job_config: What ``ConfigManager.parse_args`` returned for a recipe of this package.
        device_type: Where the job will run, ``"cuda"`` or ``"cpu"``.
        world_size: Processes of the job.

    Raises:
        ConfigError: Something is wrong; the message names every key, what it must be, its value
            and a remedy.
    """
    missing = [name for name in SECTIONS if not hasattr(job_config, name)]
    if missing:
        raise ConfigError(
            f"job.custom_config_module: must be titan_lowprec.titan.register, got "
            f"{job_config.job.custom_config_module!r}, which gives no section {missing}; set it "
            "under [job] in the recipe"
        )
    problems = [*find_problems(job_config, device_type=device_type, world_size=world_size)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"the job configuration has {count}:{lines}")


def find_problems(job_config: JobConfig, *, device_type: str, world_size: int) -> Iterator[Problem]:
    """All problems: types, then ranges, then what settings must fulfil together."""
    problems = [*type_problems(job_config)]
    problems += range_problems(job_config, wrong_type={problem.key for problem in problems})
    model_args = None
    if not touches(("model.name", "model.flavor"), problems):
        model_args = flavor_args(job_config)
        if model_args is None:
            problems.append(unknown_model(job_config))
    yield from problems
    job = Job(job_config, device_type, world_size, model_args)
    for rule in (*MODEL_RULES, *RUN_RULES, *DRAFT_RULES, *GRAPH_RULES, *CONVERSION_RULES):
        if not touches(rule.keys, problems):
            yield from rule.check(job)


def touches(keys: tuple[str, ...], problems: list[Problem]) -> bool:
    """Whether a problem is about one of the keys, its section or a key of that section."""

    def below(key: str, section: str) -> bool:
        return key == section or key.startswith(f"{section}.")

    return any(
        below(key, problem.key) or below(problem.key, key) for key in keys for problem in problems
    )


def flavor_args(job_config: JobConfig) -> Any:
    """The registered arguments of ``model.name`` and ``model.flavor``, ``None`` if unknown."""
    try:
        spec = get_train_spec(job_config.model.name)
    except ValueError:
        return None
    return spec.model_args.get(job_config.model.flavor)


def unknown_model(job_config: JobConfig) -> Problem:
    """Why ``flavor_args`` found nothing."""
    name, flavor = job_config.model.name, job_config.model.flavor
    try:
        flavors = sorted(get_train_spec(name).model_args)
    except ValueError:
        return Problem("model.name", "be a registered model", name, "use llama3_lowprec or dflash")
    return Problem("model.flavor", f"be one of {flavors} for {name}", flavor, "choose one of them")
