"""A matrix file: which settings a sweep compares."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from titan_lowprec.experiments.matrix_file import (
    MATRIX_KEYS,
    Config,
    check_tables,
    check_values,
    flatten,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]*")
SEED_KEYS = ("debug.seed", "data.seed")
PLACE_KEYS = ("job.dump_folder", "metrics.run_name")


@dataclass(frozen=True, slots=True)
class Arm:
    """One setting: a name and the dotted keys that it changes in the base recipe."""

    name: str
    overrides: Mapping[str, Any]
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Its value or choice on each axis; empty for an arm made by hand."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A read matrix file."""

    name: str
    base: Path
    baselines: Mapping[str, str]
    """Per arm, the arm that it is compared with; a baseline is its own."""
    acceptable_difference: float
    """Increase of the loss over the baseline, in nats per token, that is still acceptable."""
    metric: Literal["train", "validation"]
    seeds: tuple[int, ...]
    data_order: Literal["per_seed", "fixed"]
    """``per_seed``: seed ``s`` also orders the documents; ``fixed``: the base recipe's order."""
    arms: tuple[Arm, ...]
    processes: int = 1
    """Processes, and so devices, of one run."""
    device: Literal["any", "cuda"] = "any"
    """``cuda``: arms need a GPU; elsewhere the matrix is resolved and checked, and not run."""
    tail_fraction: float = 0.1
    """``metric = "train"``: the last part of the tokens over which the loss is averaged."""
    question: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of every arm."""


def read_matrix(path: Path) -> Matrix:
    """Read a matrix file and build its arms.

    Args:
        path: A TOML file with ``[matrix]``, and ``[axes]``, ``[choices]`` or ``[[include]]``.

    Raises:
        ValueError: A key is unknown or missing, two arms share a name, or the baseline is no arm.
    """
    try:
        text = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: must be TOML, got a syntax error: {error}; correct it") from None
    check_tables(text, str(path))
    head = text.get("matrix", {})
    check_values(head, MATRIX_KEYS, str(path))
    arms = (*axis_arms(text), *included_arms(text))
    check_names([arm.name for arm in arms], str(path))
    floats = {
        key: float(head[key]) for key in ("acceptable_difference", "tail_fraction") if key in head
    }
    known = {key: head[key] for key in head if key not in ("base", "baseline", "seeds")}
    return Matrix(
        name=path.stem,
        base=(path.parent / head["base"]).resolve(),
        baselines={arm.name: baseline_of(arm, arms, head["baseline"]) for arm in arms},
        seeds=tuple(head["seeds"]),
        arms=arms,
        extra=checked_overrides(text.get("set", {}), "[set]"),
        **{**known, **floats},
    )


def check_names(names: Sequence[str], where: str) -> None:
    """Refuse names that are no folders of their own.

    Raises:
        ValueError: There is none, or one is wrong, used twice or a file of the sweep.
    """
    if not names:
        raise ValueError(
            f"{where}: a matrix must have arms, got none; add [axes], [choices.AXIS] or [[include]]"
        )
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{where}: arm names are folder names and must match {NAME.pattern}, got {name!r}; "
                "name the value in [choices.AXIS]"
            )
        if name == "jobs" or name.startswith(("report.", "runs.json", "plan.json")):
            raise ValueError(
                f"{where}: arm names must not be those of the sweep's own files, got {name!r}; "
                "rename it"
            )
        if names.count(name) > 1:
            raise ValueError(f"{where}: arm names must differ, got {name!r} twice; rename one")


def baseline_of(arm: Arm, arms: tuple[Arm, ...], wanted: str | Config) -> str:
    """The named baseline, or the arm that differs only in having the wanted labels.

    Raises:
        ValueError: There is no such arm.
    """
    if isinstance(wanted, str):
        found = [other.name for other in arms if other.name == wanted]
    else:
        changes = flatten(wanted)
        labels = {**arm.labels, **changes} if changes.keys() <= arm.labels.keys() else None
        found = [other.name for other in arms if other.labels == labels]
    if not found:
        raise ValueError(
            f"matrix.baseline must name one of {[other.name for other in arms]} or labels of axes, "
            f"got {wanted!r}, which gives none for {arm.name}; name an arm that exists"
        )
    return found[0]


def axis_arms(text: Config) -> Iterator[Arm]:
    """The product of all axes, without the excluded points."""
    axes = [*plain_axes(text.get("axes", {})), *choice_axes(text.get("choices", {}))]
    excludes = text.get("exclude", [])
    check_axes(axes)
    keys = {axis for axis, _ in axes}
    unused = list(excludes)
    for exclude in excludes:
        unknown = sorted(flatten(exclude).keys() - keys)
        if unknown or not exclude:
            raise ValueError(
                f"[[exclude]]: keys must be among the axes {sorted(keys)}, got {unknown}; "
                "name axes and their values"
            )
    for point in product(*(values for _, values in axes)) if axes else ():
        labels = dict(zip([axis for axis, _ in axes], [label for label, _ in point], strict=True))
        hits = [exclude for exclude in excludes if matches(flatten(exclude), labels)]
        unused = [exclude for exclude in unused if exclude not in hits]
        if hits:
            continue
        overrides = {key: value for _, changes in point for key, value in changes.items()}
        yield Arm(arm_name(labels, text.get("choices", {})), overrides, labels)
    if unused:
        raise ValueError(
            f"[[exclude]]: each must match an arm, got {unused}, which matches none; remove it"
        )


def check_axes(axes: Sequence[tuple[str, list[tuple[Any, Config]]]]) -> None:
    """Refuse two axes that set one key: an arm's name would then say what does not hold.

    Raises:
        ValueError: The first such key, with its axes.
    """
    owners: dict[str, str] = {}
    for axis, values in axes:
        for key in sorted({key for _, changes in values for key in changes}):
            if owners.setdefault(key, axis) != axis:
                raise ValueError(
                    f"axes: a key must be set by one axis, got {key} set by {owners[key]} and "
                    f"{axis}; set it in one"
                )


def plain_axes(table: Config) -> Iterator[tuple[str, list[tuple[Any, Config]]]]:
    """``"section.key" = [values]``: each value is its own label."""
    for key, values in flatten(table).items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"[axes]: {key} must be a list of values, got {values!r}; list them")
        if any(isinstance(value, list | dict) for value in values):
            raise ValueError(f"[axes]: {key} must hold plain values; name others in [choices]")
        yield key, [(value, checked_overrides({key: value}, "[axes]")) for value in values]


def choice_axes(table: Config) -> Iterator[tuple[str, list[tuple[str, Config]]]]:
    """``[choices.axis]`` with ``label = {overrides}``: keys that change together."""
    for axis, labels in table.items():
        yield (
            axis,
            [
                (label, checked_overrides(changes, f"[choices.{axis}] {label}"))
                for label, changes in labels.items()
            ],
        )


def included_arms(text: Config) -> Iterator[Arm]:
    """Arms outside the product, named by hand."""
    for entry in text.get("include", []):
        if entry.keys() - {"name", "set"} or "name" not in entry:
            raise ValueError(f"[[include]]: keys must be name and set, got {sorted(entry)}")
        if not (isinstance(entry["name"], str) and isinstance(entry.get("set", {}), dict)):
            raise ValueError(
                f"[[include]]: name must be a string and set a table, got {entry}; correct it"
            )
        yield Arm(entry["name"], checked_overrides(entry.get("set", {}), "[[include]]"))


def arm_name(labels: Mapping[str, Any], choices: Config) -> str:
    """Labels of choices as they are, values of axes behind the last part of their key."""
    short = [axis.rpartition(".")[2] for axis in labels]

    def part(axis: str, label: Any) -> str:
        if axis in choices:
            return str(label)
        last = axis.rpartition(".")[2]
        value = str(label).lower() if isinstance(label, bool) else str(label)
        return f"{last if short.count(last) == 1 else axis}={value}"

    return ",".join(part(axis, label) for axis, label in labels.items())


def matches(exclude: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    """Whether every key of an exclusion names (or lists) the point's label."""

    def same(wanted: Any, label: Any) -> bool:
        accepted = wanted if isinstance(wanted, list) else [wanted]
        return any(type(label) is type(value) and label == value for value in accepted)

    return all(same(wanted, labels[axis]) for axis, wanted in exclude.items())


def checked_overrides(table: Config, where: str) -> Config:
    """Dotted overrides without the keys that the sweep itself sets."""
    overrides = flatten(table)
    reserved = [key for key in (*SEED_KEYS, *PLACE_KEYS) if key in overrides]
    if reserved:
        raise ValueError(
            f"{where}: the sweep itself must set {reserved}: remove them and use matrix.seeds and "
            "matrix.data_order"
        )
    return overrides
