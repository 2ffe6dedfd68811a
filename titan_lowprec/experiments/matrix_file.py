"""What ``[matrix]`` of a matrix file may hold, and tables as dotted keys."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
"""Sections of a recipe, or dotted keys with their values."""

TABLES: Mapping[str, str] = {
    "matrix": "a table",
    "set": "a table",
    "axes": "a table",
    "choices": "a table of tables",
    "include": "a list of tables, [[include]]",
    "exclude": "a list of tables, [[exclude]]",
}
"""Tables of a matrix file, and what each must be."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: what it must be, in words and as a check."""

    required: bool
    must: str
    good: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """A finite int or float that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    """A positive int."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def are_seeds(value: Any) -> bool:
    """A list of distinct ints from 0 on."""
    if not isinstance(value, list) or not value:
        return False
    ints = [item for item in value if type(item) is int and item >= 0]
    return len(ints) == len(value) == len(set(ints))


def is_text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


MATRIX_KEYS: Mapping[str, Key] = {
    "question": Key(False, "be a string", is_text),
    "base": Key(True, "be the path of a recipe, relative to this file", is_text),
    "baseline": Key(
        True,
        "be the name of an arm, or labels of axes that turn each arm into its baseline",
        lambda value: is_text(value) or (isinstance(value, dict) and bool(value)),
    ),
    "acceptable_difference": Key(
        True, "be a number of nats, at least 0", lambda value: is_number(value) and value >= 0
    ),
    "metric": Key(
        True, 'be "train" or "validation"', lambda value: value in ("train", "validation")
    ),
    "seeds": Key(True, "be a list of different integers from 0 on", are_seeds),
    "data_order": Key(
        True, 'be "per_seed" or "fixed"', lambda value: value in ("per_seed", "fixed")
    ),
    "processes": Key(False, "be a positive integer", is_count),
    "device": Key(False, 'be "any" or "cuda"', lambda value: value in ("any", "cuda")),
    "tail_fraction": Key(
        False, "be over 0 and at most 1", lambda value: is_number(value) and 0 < value <= 1
    ),
}


def check_tables(text: Config, where: str) -> None:
    """Refuse unknown tables, and values where tables must be.

    Raises:
        ValueError: The first that is wrong, with what it must be.
    """
    unknown = sorted(text.keys() - TABLES.keys())
    if unknown:
        raise ValueError(
            f"{where}: tables must be among {sorted(TABLES)}, got {unknown}; remove it"
        )

    def good(value: Any, must: str) -> bool:
        if must.startswith("a list"):
            return isinstance(value, list) and all(isinstance(item, dict) for item in value)
        if not isinstance(value, dict):
            return False
        deeper = [v if isinstance(v, dict) else {"": v} for v in value.values()]
        tables = [item for table in deeper for item in table.values()]
        return must == "a table" or all(isinstance(item, dict) for item in tables)

    for name, value in text.items():
        if not good(value, TABLES[name]):
            raise ValueError(f"{where}: {name} must be {TABLES[name]}, got {value!r}; correct it")
    if empty := [axis for axis, labels in text.get("choices", {}).items() if not labels]:
        raise ValueError(f"{where}: [choices] must have labels, got none for {empty}; add some")


def check_values(table: Mapping[str, Any], keys: Mapping[str, Key], where: str) -> None:
    """Refuse unknown, missing and wrong keys.

    Raises:
        ValueError: The first that is wrong, with what it must be.
    """
    unknown = sorted(table.keys() - keys.keys())
    if unknown:
        raise ValueError(
            f"{where}: keys of [matrix] must be among {sorted(keys)}, got {unknown}; correct them"
        )
    for name, key in keys.items():
        if name not in table:
            if key.required:
                raise ValueError(f"{where}: matrix.{name} must {key.must}, got nothing; add it")
        elif not key.good(table[name]):
            raise ValueError(
                f"{where}: matrix.{name} must {key.must}, got {table[name]!r}; correct it"
            )


def flatten(table: Mapping[str, Any], prefix: str = "") -> Config:
    """Nested tables as dotted keys."""
    flat: Config = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
