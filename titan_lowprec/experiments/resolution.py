"""A matrix resolved: one complete recipe per run, before anything is started.

The room imports nothing of the trainer. What a key means is decided by ``resolve``, a callable that
completes and checks a configuration (``tools/sweep.py`` passes TorchTitan's parser and our checks).
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_lowprec.experiments.matrix import PLACE_KEYS, SEED_KEYS, Arm, Matrix
from titan_lowprec.experiments.matrix_file import Config, flatten

Resolve = Callable[[Config], Config]
"""Completes a recipe with every default; raises ``ValueError`` if it cannot work."""

NOT_IDENTITY = (*PLACE_KEYS, "job.config_file", "job.description", "data.cache_dir")
"""Keys that change where a run writes or what it is called, not what it computes."""


@dataclass(frozen=True, slots=True)
class Run:
    """One arm with one seed: a complete recipe and the hash of what it computes."""

    arm: str
    seed: int
    config: Config
    hash: str

    @property
    def name(self) -> str:
        """Arm and seed."""
        return f"{self.arm}/seed{self.seed}"

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.config["job"]["dump_folder"])

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config["training"]["steps"]


def resolve_runs(matrix: Matrix, *, output: Path, resolve: Resolve) -> tuple[Run, ...]:
    """Complete and check the recipe of every run, before anything is started.

    Args:
        matrix: What to compare.
        output: Folder of all sweeps; a run writes to ``output/matrix/arm/seedN-hash``.
        resolve: Completes and checks a recipe.

    Raises:
        ValueError: A recipe is refused, or two arms would compute the same.
    """
    base = tomllib.loads(matrix.base.read_text())
    runs: list[Run] = []
    seen: dict[str, str] = {}
    for arm in matrix.arms:
        for seed in matrix.seeds:
            config = draft(base, matrix, arm, seed, output)
            try:
                config = resolve(config)
                digest = config_hash(config, processes=matrix.processes)
            except ValueError as error:
                raise ValueError(f"{matrix.name}, arm {arm.name}: {error}") from error
            name = f"{arm.name}/seed{seed}"
            same = config_hash(alike(config), processes=matrix.processes)
            if same in seen:
                raise ValueError(
                    f"{matrix.name}: arms must differ, got {seen[same]} and {name} with equal "
                    "configurations; exclude one"
                )
            seen[same] = name
            folder = output / matrix.name / arm.name / f"seed{seed}-{digest[:8]}"
            config["job"]["dump_folder"] = str(folder)
            runs.append(Run(arm.name, seed, config, digest))
    return tuple(runs)


def draft(base: Config, matrix: Matrix, arm: Arm, seed: int, output: Path) -> Config:
    """The base recipe with an arm's and the sweep's overrides."""
    config = deepcopy(base)
    data = config.setdefault("data", {})
    data.setdefault("cache_dir", str(output / "data_cache"))
    changes: Config = {**matrix.extra, **arm.overrides, "debug.seed": seed}
    if matrix.data_order == "per_seed":
        changes["data.seed"] = seed
    changes["metrics.run_name"] = f"{matrix.name}/{arm.name}/seed{seed}"
    changes["job.description"] = f"{matrix.name}: {arm.name}, seed {seed}"
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        if not section:
            raise ValueError(f"{matrix.name}: keys must be section.key, got {key!r}; name both")
        table = config
        for part in section.split("."):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ValueError(
                    f"{matrix.name}: keys must lie in tables, got {key!r} under a value; correct it"
                )
        table[name] = deepcopy(value)
    return config


def config_hash(config: Config, *, processes: int) -> str:
    """64 hexadecimal digits of what a configuration computes, wherever it writes."""
    flat = {key: value for key, value in flatten(config).items() if key not in NOT_IDENTITY}
    text = json.dumps([flat, processes], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def alike(config: Config) -> Config:
    """Dotted keys with whole numbers as integers: 1 and 1.0 compute the same."""

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return {key: whole(value) for key, value in flatten(config).items()}


def differing_keys(
    runs: Sequence[Run], *, hidden: Sequence[str] = (*NOT_IDENTITY, *SEED_KEYS)
) -> dict[str, Config]:
    """Per arm, the dotted keys, but for the hidden ones, whose values are not equal in all arms."""
    first = {run.arm: flatten(run.config) for run in reversed(runs)}
    keys = sorted({key for flat in first.values() for key in flat} - set(hidden))

    def differs(key: str) -> bool:
        return len({json.dumps(flat.get(key)) for flat in first.values()}) > 1

    chosen = [key for key in keys if differs(key)]
    return {run.arm: {key: first[run.arm].get(key) for key in chosen} for run in runs}
