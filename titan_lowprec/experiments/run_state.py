"""What became of a run, kept in files of its folder: ``state.json``, ``metrics.jsonl``, a lock."""

import fcntl
import json
import os
import signal
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from titan_lowprec.experiments.resolution import Run

Status = Literal["new", "running", "interrupted", "failed", "finished"]
RECIPE_FILE = "recipe.toml"
RUNS_FILE = "runs.json"
STATE_FILE = "state.json"
LOCK_FILE = "lock"
LOG_FILE = "log.txt"
METRICS_FILE = "metrics.jsonl"
TAIL_BYTES = 65536
LOCK_PAUSES_S = (0.0, 0.05, 0.1)
"""Somebody who only looks whether a folder is locked holds its lock for a moment."""


@dataclass(frozen=True, slots=True)
class State:
    """One run's past."""

    status: Status
    hash: str
    attempts: int = 0
    exit_status: int | None = None
    reason: str = ""
    """Why it failed, in a line."""
    seconds: float = 0.0
    """Wall-clock time of all attempts."""


def read_state(run: Run) -> State:
    """A run's state; one that is marked as running without a living process was interrupted.

    A run that was started by hand has no state file and counts once its last step is recorded.

    Raises:
        ValueError: The folder holds a run of another configuration.
    """
    path = run.folder / STATE_FILE
    if not path.is_file():
        done = last_step(run.folder) >= run.steps
        return State("finished" if done else "new", run.hash)
    state = State(**json.loads(path.read_text()))
    if state.hash != run.hash:
        raise ValueError(
            f"{path}: must belong to configuration {run.hash[:16]}, got {state.hash[:16]}; "
            "move the folder away"
        )
    if state.status == "running" and not is_locked(run.folder):
        return replace(state, status="interrupted")
    return state


def write_state(run: Run, state: State) -> None:
    """Replace ``state.json`` in one step."""
    replace_text(run.folder / STATE_FILE, json.dumps(asdict(state), indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file in one step, whoever else reads or writes it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def save_runs(runs: Sequence[Run], folder: Path) -> None:
    """Write every run's complete recipe, and ``runs.json``, the list of them.

    Args:
        runs: All runs of a matrix.
        folder: The sweep's folder.
    """
    for run in runs:
        run.folder.mkdir(parents=True, exist_ok=True)
        replace_text(run.folder / RECIPE_FILE, tomli_w.dumps(run.config))
    rows = [
        {"arm": run.arm, "seed": run.seed, "hash": run.hash, "folder": str(run.folder)}
        for run in runs
    ]
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / RUNS_FILE, json.dumps(rows, indent=1) + "\n")


def load_runs(folder: Path) -> tuple[Run, ...]:
    """The runs that ``save_runs`` wrote.

    Raises:
        ValueError: The sweep was never started.
    """
    path = folder / RUNS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: must list the sweep's runs, is missing; run tools/sweep.py")
    rows = json.loads(path.read_text())
    places = [folder / row["arm"] / Path(row["folder"]).name for row in rows]
    return tuple(
        Run(row["arm"], row["seed"], read_recipe(place), row["hash"])
        for row, place in zip(rows, places, strict=True)
    )


def read_recipe(folder: Path) -> dict[str, Any]:
    """A run's complete recipe; it writes where it lies, also after the sweep was moved."""
    recipe = tomllib.loads((folder / RECIPE_FILE).read_text())
    recipe["job"]["dump_folder"] = str(folder)
    return recipe


def take_lock(folder: Path) -> int | None:
    """A descriptor that locks the folder until the last process that inherits it ends.

    Returns:
        The descriptor, ``None`` if another process has the lock.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    for pause_s in LOCK_PAUSES_S:
        time.sleep(pause_s)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            continue
    os.close(descriptor)
    return None


def is_locked(folder: Path) -> bool:
    """Whether a process works in the folder."""
    descriptor = take_lock(folder)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def last_step(folder: Path) -> int:
    """The newest step in ``metrics.jsonl``, 0 without one; reads only the end of the file."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    for text in reversed(lines[:-1]):  # what follows the last newline is being written
        try:
            return int(json.loads(text)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def file_size(path: Path) -> int:
    """Bytes of a file, 0 without one."""
    return path.stat().st_size if path.is_file() else 0


def steps_since(folder: Path, size: int) -> int:
    """Training steps written since ``metrics.jsonl`` had a size.

    An attempt that goes on from a checkpoint repeats steps, so the number of the newest step does
    not say how much was done.
    """
    if file_size(folder / METRICS_FILE) <= size:
        return 0
    with (folder / METRICS_FILE).open("rb") as file:
        file.seek(size)
        *whole, _ = file.read().split(b"\n")
    return sum(line.startswith(b'{"kind": "train"') for line in whole)


def failure_reason(folder: Path, *, status: int, since: int = 0) -> str:
    """Why a run ended: a signal, and the last line of its log that looks like an error.

    Args:
        folder: The run's folder.
        status: As ``subprocess`` has it, negative after a signal.
        since: Bytes of the log before this attempt; what an earlier one said is not the reason.
    """
    line = last_error(folder / LOG_FILE, since)
    if status >= 0:
        return line or "no output"
    killed = f"killed by {signal.Signals(-status).name}"
    return f"{killed}, last line: {line}" if line else killed


def last_error(path: Path, since: int) -> str:
    """The last line of a log that looks like an error, else its last line."""
    if file_size(path) <= since:
        return ""
    with path.open("rb") as file:
        file.seek(max(since, file_size(path) - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [
        line
        for line in lines
        if line.partition(":")[0].rpartition(".")[2].endswith(("Error", "Exception", "Run"))
        and " " not in line.partition(":")[0]
    ]
    return (errors or lines or [""])[-1][:300]
