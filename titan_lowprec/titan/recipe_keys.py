"""Name every key of a recipe that does not exist, and the one that was probably meant."""

import difflib
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigManager


def unknown_keys(recipe: str | Path, args: list[str]) -> list[str]:
    """Keys of a recipe that no section has.

    Args:
        recipe: A TOML file.
        args: The command line, which may name another module of sections.

    Returns:
        One line a key, with its nearest neighbour, or its section's keys where none is near.
    """
    values = tomllib.loads(Path(recipe).read_text())
    sections = ConfigManager()._maybe_add_custom_config(args, values)
    return _unknown(sections, values, "")


def _unknown(section: Any, values: dict[str, Any], prefix: str) -> list[str]:
    known = {field.name: field.type for field in fields(section)}
    lines: list[str] = []
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {sorted(known)}"
            lines.append(f"{prefix}{name}: must be a key that exists, is not one; {hint}")
        elif is_dataclass(known[name]) and isinstance(value, dict):
            lines += _unknown(known[name], value, f"{prefix}{name}.")
    return lines
