"""Packages that few need, imported where they are used."""

import importlib
from typing import Any


def need(module: str, *, who: str, remedy: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Its dotted name.
        who: Who needs it, for the message.
        remedy: How to get it or do without.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise ValueError(f"{who}: {package} must be installed, got {error}; {remedy}") from error
