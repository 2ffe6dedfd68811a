"""What a run was: its resolved configuration, versions, commit and command line."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torchtitan.config import JobConfig

import titan_lowprec
from titan_lowprec.titan.memory_monitor import cpu_model

PACKAGES = (
    "torch",
    "triton",
    "torchtitan",
    "torchao",
    "titan_lowprec",
    "datasets",
    "tokenizers",
)
RUN_FOLDER = "run"


def save_run_record(job_config: JobConfig, *, dump_folder: str, world_size: int) -> Path | None:
    """Write ``run/config.toml`` and ``run/versions.json`` of this attempt.

    The newest attempt has the plain names; earlier ones are renamed to ``config.1.toml``,
    ``config.2.toml``, ... and keep their numbers. Only rank 0 writes.

    Args:
        job_config: The resolved configuration.
        dump_folder: The job's output folder.
        world_size: Processes of the job.

    Returns:
        The folder of the record, ``None`` on other ranks.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return None
    folder = Path(dump_folder) / RUN_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    keep_earlier_attempt(folder)
    record = {
        **collect_versions(),
        "world_size": world_size,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_atomically(folder / "versions.json", json.dumps(record, indent=1).encode() + b"\n")
    write_atomically(folder / "config.toml", tomli_w.dumps(config_as_toml(job_config)).encode())
    return folder


def config_as_toml(job_config: JobConfig) -> dict[str, Any]:
    """The configuration without its ``None`` keys, which TOML lacks; loads as a recipe."""

    def without_none(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: without_none(item) for key, item in value.items() if item is not None}

    return without_none(job_config.to_dict())


def keep_earlier_attempt(folder: Path) -> None:
    """Give the files of the attempt before this one the next free number."""
    number = 1
    while any((folder / name).exists() for name in numbered(number)):
        number += 1
    for plain, name in zip(("config.toml", "versions.json"), numbered(number), strict=True):
        if (folder / plain).exists():
            (folder / plain).rename(folder / name)


def numbered(number: int) -> tuple[str, str]:
    """File names of an earlier attempt."""
    return f"config.{number}.toml", f"versions.{number}.json"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that a crash leaves no half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def collect_versions() -> dict[str, Any]:
    """Versions, device, commit and command line of this process."""
    versions: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = installed_version(package)
    versions["torch"] = torch.__version__  # with the build, which the metadata may lack
    versions["device"] = device_name()
    versions["commit"], versions["dirty"] = checkout_state(Path(titan_lowprec.__file__).parent)
    versions["command"] = shlex.join(sys.orig_argv)
    return versions


def installed_version(package: str) -> str | None:
    """A distribution's version, ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(titan_lowprec, "__version__", None) if package == "titan_lowprec" else None


def device_name() -> str:
    """The present CUDA device's name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {cpu_model()}".strip()


def checkout_state(package: Path) -> tuple[str | None, bool | None]:
    """Commit of the git checkout that tracks the package, and whether tracked files differ.

    A package installed somewhere inside another project's repository has no commit of its own.
    """

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "-C", str(package), *arguments],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", "__init__.py"):
        return None, None
    changes = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD"), None if changes is None else bool(changes)
