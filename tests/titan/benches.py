"""The scripts of tools/bench as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "bench"


def load_bench(name: str) -> ModuleType:
    """Import ``tools/bench/<name>.py`` without running it."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
