"""``metrics.jsonl``: one JSON object per step, only ever appended to, and its reader.

Lines are of kind ``train``, ``validation`` or ``resume``. A run that continues at step ``s`` first
appends ``{"kind": "resume", "step": s, "attempt": n}``: lines of earlier attempts with a later step
stay in the file and stop counting. Numbers that JSON lacks are written as ``null`` and spelled in
the line's ``non_finite`` object.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, Literal

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """Appends lines to one job's ``metrics.jsonl``, over any number of attempts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        earlier = path.read_bytes() if path.exists() else b""
        self.attempt = _attempts(earlier) + 1
        self.continues = bool(earlier)
        """Whether lines of an earlier attempt exist that this one has not yet superseded."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if earlier and not earlier.endswith(b"\n"):
            os.write(self._descriptor, b"\n")  # close the line that a crash left half-written

    def resume_at(self, step: int) -> None:
        """Say that this attempt's first step is ``step + 1``."""
        self.continues = False
        self._write({"kind": "resume", "step": step, "attempt": self.attempt})

    def append(self, line: dict[str, Any]) -> None:
        """Write one line; it reaches the operating system before this returns."""
        if self.continues:
            self.resume_at(line["step"] - 1)
        self._write({**line, "attempt": self.attempt})

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(_spell_non_finite(line), allow_nan=False).encode() + b"\n"
        written = os.write(self._descriptor, data)
        if written != len(data):
            raise OSError(
                f"metrics: {len(data)} bytes of {METRICS_FILE} must be written, got {written}; "
                "free space on the disk of job.dump_folder"
            )


def read_metrics(
    path: str | os.PathLike[str], *, kind: Literal["train", "validation"] | None = None
) -> list[dict[str, Any]]:
    """The records of a job that count, in step order, each step once per kind.

    Args:
        path: A ``metrics.jsonl``.
        kind: Which lines to return; ``None`` is both, a step's training before its validation.

    Returns:
        Records without the superseded lines of attempts that a later one continued from before.
        Non-finite numbers are floats again.

    Raises:
        ValueError: A line inside an attempt is damaged, or an attempt has a step twice.
    """
    records: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    damaged = 0
    for number, text in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not text:
            continue
        line = _parse(text)
        if line is None:
            damaged = number
            continue
        if line["kind"] == "resume":
            damaged = 0  # the line before belongs to a crash that this attempt recovered from
            for steps in records.values():
                for step in [step for step in steps if step > line["step"]]:
                    del steps[step]
            continue
        if damaged:
            raise ValueError(
                f"read_metrics: every line inside an attempt must be JSON, got a damaged line "
                f"{damaged} in {path}; restore the file or delete that line"
            )
        _add(records[line["kind"]], line, path)
    chosen = [
        record
        for name, steps in records.items()
        if kind in (None, name)
        for record in steps.values()
    ]
    return sorted(chosen, key=lambda record: record["step"])


def _add(
    steps: dict[int, dict[str, Any]], line: dict[str, Any], path: str | os.PathLike[str]
) -> None:
    if line["step"] in steps:
        raise ValueError(
            f"read_metrics: a step must appear once per attempt, got {line['kind']} step "
            f"{line['step']} twice in {path}; give jobs that run at once their own job.dump_folder"
        )
    for key, text in line.pop("non_finite", {}).items():
        line[key] = float(text)
    steps[line["step"]] = line


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:  # UnicodeDecodeError and JSONDecodeError are both ValueErrors
        return None
    return line if isinstance(line, dict) else None


def _attempts(earlier: bytes) -> int:
    lines = [line for line in map(_parse, earlier.split(b"\n")) if line is not None]
    return max((line.get("attempt", 0) for line in lines), default=0)


def _spell_non_finite(line: dict[str, Any]) -> dict[str, Any]:
    bad = {
        key: str(value)
        for key, value in line.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    if not bad:
        return line
    return {**line, **dict.fromkeys(bad), "non_finite": bad}
