"""Time the implementations of an op beside one another, after its tests have passed.

    python tools/bench/run.py --op cross_entropy --suite full --output records.jsonl

Implementations of a case run interleaved: every round times each of them once, in an order drawn
anew, and the median over rounds is reported. A drifting clock reaches all of them alike, and so
does the head start of whoever follows an implementation that leaves the chip cool. A row whose
error is above its tolerance is recorded with ``correct: false`` and without a time.
`bench_registry.py` says what an op's module provides.
"""

import argparse
import gc
import importlib
import json
import platform
import random
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from bench_registry import Case, Implementation, Workload  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--op", required=True, help="module in tools/bench")
    parser.add_argument("--suite", default="smoke")
    parser.add_argument("--only", nargs="*", help="names of implementations to run")
    parser.add_argument("--cases", nargs="*", help="names of cases to run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument(
        "--tests-passed-at", help="skip the tests: the commit at which they passed on this device"
    )
    return parser.parse_args()


def run_tests(paths: tuple[str, ...], device: torch.device) -> None:
    """Stop the program unless the op's tests for this kind of device pass."""
    chosen = "gpu and not slow" if device.type == "cuda" else "not slow"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", chosen, *paths]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SystemExit(f"run.py: no timing, the tests failed: {' '.join(command)}")


def current_commit(given: str | None) -> str:
    if given:
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit("run.py: no git checkout here; name the commit with --commit")
    return done.stdout.strip()


def environment(device: torch.device) -> dict[str, Any]:
    """Device and versions of a record."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        versions["triton"] = importlib.import_module("triton").__version__
    except ImportError:
        versions["triton"] = "absent"
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu"
    return {"device": name, "versions": versions}


HEAD_START_CYCLES = 16_000_000
"""About 9 ms of GPU idling before a timed run, in which the host queues the run's launches."""


def time_once_us(function: Any, device: torch.device) -> float:
    """One run in microseconds: device events on a GPU, a host clock elsewhere.

    The device waits before the first event, so its time holds no waiting for launches: in training
    the host runs ahead as well.
    """
    if device.type != "cuda":
        start_s = time.perf_counter()
        function()
        return (time.perf_counter() - start_s) * 1e6
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def peak_bytes(function: Any, device: torch.device, result_bytes: int) -> int | None:
    """Most memory allocated during one run, less what was there before and the results."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - result_bytes)


def prepare(
    implementation: Implementation, case: Case, inputs: Any, device: torch.device
) -> tuple[dict[str, Any], Workload | None]:
    """The record's beginning (error and verdict) and the workload, or ``None`` if not timed."""
    reason = implementation.unavailable(device)
    if reason is not None:
        return {"correct": None, "error": None, "reason": reason}, None
    try:
        workload = implementation.prepare(case, inputs)
        error = float(workload.error())
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as failure:
        reason = f"{type(failure).__name__}: {str(failure)[:300]}"
        return {"correct": False, "error": None, "reason": reason}, None
    passed = error <= workload.tolerance
    record = {"correct": passed, "error": error, "tolerance": workload.tolerance}
    return record, workload if passed else None


def time_interleaved(
    functions: dict[tuple[str, str], Any], rounds: int, device: torch.device
) -> dict[tuple[str, str], float]:
    """Median microseconds of each function, every round running each once in a random order."""
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in functions}
    for function in functions.values():
        function()
    order, draw = list(functions), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for key in order:
            samples[key].append(time_once_us(functions[key], device))
    return {key: statistics.median(values) for key, values in samples.items()}


def run_case(module: Any, case: Case, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All records of one case."""
    device = torch.device(arguments.device)
    inputs = module.make_inputs(case, device)
    chosen = [
        one for one in module.IMPLEMENTATIONS if not arguments.only or one.name in arguments.only
    ]
    prepared = {one.name: prepare(one, case, inputs, device) for one in chosen}
    functions = {
        (name, which): function
        for name, (_, workload) in prepared.items()
        if workload is not None
        for which, function in workload.passes.items()
    }
    times = time_interleaved(functions, arguments.rounds, device)
    records = []
    for name, (verdict, workload) in prepared.items():
        common = {"op": arguments.op, "impl": name, "case": case.name}
        if workload is None:
            nothing = {"pass": None, "time_us": None, "tflops": None, "peak_bytes": None}
            records.append({**common, **nothing, **verdict})
            continue
        for which, function in workload.passes.items():
            time_us = times[(name, which)]
            flops = workload.flops.get(which)
            measured = {
                "pass": which,
                "time_us": round(time_us, 2),
                "tflops": round(flops / time_us / 1e6, 2) if flops else None,
                "peak_bytes": peak_bytes(function, device, workload.result_bytes.get(which, 0)),
            }
            records.append({**common, **measured, **verdict})
    return records


def print_table(records: list[dict[str, Any]]) -> None:
    base: dict[str, float] = {}
    for record in records:
        if record["time_us"] is None:
            print(f"{record['case']:34} {record['impl']:22} {record.get('reason') or record}")
            continue
        first = base.setdefault(record["pass"], record["time_us"])
        peak = record["peak_bytes"]
        print(
            f"{record['case']:34} {record['impl']:22} {record['pass']:17}"
            f"{record['time_us'] / 1e3:10.3f} ms {record['time_us'] / first:6.3f}x"
            f" {record['tflops'] or 0:7.1f} TF/s"
            f" {(peak or 0) / 2**30:7.3f} GiB  err {record['error']:.2e}",
            flush=True,
        )


def main() -> None:
    arguments = parse_arguments()
    module = importlib.import_module(arguments.op)
    if arguments.tests_passed_at is None:
        run_tests(module.TESTS, torch.device(arguments.device))
    stamp = {
        **environment(torch.device(arguments.device)),
        "commit": current_commit(arguments.commit),
        "tests_passed_at": arguments.tests_passed_at or "this run",
        "run": uuid.uuid4().hex[:12],
        "rounds": arguments.rounds,
    }
    for case in module.cases(arguments.suite, torch.device(arguments.device)):
        if arguments.cases and case.name not in arguments.cases:
            continue
        records = run_case(module, case, arguments)
        print_table(records)
        if arguments.output is not None:
            with arguments.output.open("a") as stream:
                stream.writelines(json.dumps({**one, **stamp}) + "\n" for one in records)
        gc.collect()
        if arguments.device.startswith("cuda"):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
