"""Every check of the repository: format, lint, types, import rules and tests.

python tools/check.py          two minutes: static checks and the fast tests, beside one another
python tools/check.py --all    every CPU test, shape-checked and compiled passes
python tools/check.py --fix    format and repair what can be repaired, then check
python tools/check.py --gpu    the kernels' tests as well (needs a GPU)
python tools/check.py --bench  benchmarks after the tests (needs a GPU)
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TYPES = "types"
"""Runs beside the tests: it takes half a minute of one core."""
SHAPE_CHECKS = ["--jaxtyping-packages=titan_lowprec,beartype.beartype"]


def module(name: str, *args: str) -> list[str]:
    return [sys.executable, "-m", name, *args]


def pytest(marks: str, *args: str) -> list[str]:
    workers = ["-n", "2"] if importlib.util.find_spec("xdist") else []
    return module("pytest", "-q", "-m", marks, *workers, *args)


def commands(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The checks in order, by name."""
    checks = []
    if options.fix:
        checks += [
            ("repair", module("ruff", "check", "--fix", "--quiet", ".")),
            ("reformat", module("ruff", "format", "--quiet", ".")),
        ]
    checks += [
        ("format", module("ruff", "format", "--check", ".")),
        ("lint", module("ruff", "check", ".")),
        ("imports", [str(Path(sys.executable).parent / "lint-imports")]),
        (TYPES, module("pyright", "--pythonpath", sys.executable)),
    ]
    if options.all:
        checks += [
            ("tests", pytest("not compile and not gpu", *SHAPE_CHECKS)),
            ("compiled tests", pytest("compile and not gpu")),
        ]
    else:
        checks.append(("fast tests", pytest("not compile and not gpu and not slow")))
    if options.gpu:
        checks.append(("gpu tests", module("pytest", "-q", "-m", "gpu")))
    if options.bench:
        for op in ("attention", "cross_entropy"):
            bench = [sys.executable, "tools/bench/run.py", "--op", op]
            checks.append((f"benchmark of {op}", bench))
    return checks


class Check:
    """A check that runs, in front or beside others; the latter's output waits for its end."""

    def __init__(self, name: str, command: list[str], *, beside: bool) -> None:
        self.name, self.begin = name, time.perf_counter()
        note = ", beside what follows" if beside else ""
        print(f"== {name}{note}: {' '.join(command[1:])}", flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        pipe = subprocess.PIPE if beside else None
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe)

    def passed(self) -> bool:
        """Wait for the end and say what came out."""
        output, _ = self.process.communicate()
        if output:
            print(output.decode(errors="replace"), end="")
        ok = self.process.returncode == 0
        seconds = time.perf_counter() - self.begin
        note = " when waited for" if output else ""
        print(f"== {self.name}: {'ok' if ok else 'FAILED'} ({seconds:.1f} s{note})", flush=True)
        return ok


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for flag in ("all", "fix", "gpu", "bench"):
        parser.add_argument(f"--{flag}", action="store_true")
    failed: list[str] = []
    beside: list[Check] = []
    for name, command in commands(parser.parse_args()):
        check = Check(name, command, beside=name == TYPES)
        if name == TYPES:
            beside.append(check)
        elif not check.passed():
            failed.append(name)
    failed += [check.name for check in beside if not check.passed()]
    print("all checks passed" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
