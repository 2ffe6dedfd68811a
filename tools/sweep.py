"""Run an ablation matrix: every arm with every seed, resumable, then the report.

    python tools/sweep.py configs/attention_recipe_tiny.toml --dry-run
    python tools/sweep.py configs/attention_recipe_tiny.toml [--devices 0,1,2,3] [--jobs 2]
    python tools/sweep.py configs/attention_recipe_tiny.toml --status
    python tools/sweep.py configs/attention_recipe_tiny.toml --only 'bf16' '*/seed0'
    python tools/sweep.py configs/attention_recipe_1b.toml --cluster slurm \\
        --cluster-option slurm_partition=gpu timeout_min=1440
    python tools/sweep.py configs/attention_recipe_1b.toml --print-commands

Finished runs are skipped, interrupted ones continue from their checkpoint, failed ones wait for
--retry-failed. Ctrl-C lets the runs save a checkpoint; a second start goes on from there.
--cluster submits a job for every run that is left (pip install 'titan_lowprec[cluster]');
tools/report.py then reads what they wrote. Submitting again before a job has started queues another
for its run: the first to start trains it, the other ends at once.
"""

import argparse
import fnmatch
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import tomli_w
import torch

from titan_lowprec import _autoload
from titan_lowprec.experiments import cluster, run_state, runner
from titan_lowprec.experiments.matrix import Matrix, read_matrix
from titan_lowprec.experiments.plan import state_plan
from titan_lowprec.experiments.report import write_report
from titan_lowprec.experiments.report_table import markdown_table
from titan_lowprec.experiments.resolution import Run, differing_keys, resolve_runs
from titan_lowprec.experiments.results import load_histories, summarise


def resolver(processes: int, *, device: str = "any"):
    """Completes a recipe with TorchTitan's parser and checks it for this machine, or a GPU."""
    _autoload.assume_cpu_without_accelerator()
    from titan_lowprec.titan.check_config import check_config
    from titan_lowprec.titan.run_record import config_as_toml
    from titan_lowprec.titan.validate import error_text, load_recipe

    device_type = "cuda" if device == "cuda" or torch.cuda.is_available() else "cpu"

    def resolve(config: dict) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            recipe = Path(folder) / "recipe.toml"
            recipe.write_text(tomli_w.dumps(config))
            try:
                merged = load_recipe(str(recipe), [])
                check_config(merged, device_type=device_type, world_size=processes)
            except (Exception, SystemExit) as error:
                raise ValueError(error_text(error)) from error
        merged.job.config_file = None
        return config_as_toml(merged)

    return resolve


def select(runs: tuple[Run, ...], patterns: list[str] | None) -> list[Run]:
    """Runs whose arm or name matches a pattern; each pattern must match something."""
    if not patterns:
        return list(runs)

    def fits(run: Run, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (run.arm, run.name))

    for pattern in patterns:
        if not any(fits(run, pattern) for run in runs):
            names = ", ".join(dict.fromkeys(run.arm for run in runs))
            raise ValueError(f"--only {pattern}: must match an arm or arm/seedN, got none; {names}")
    return [run for run in runs if any(fits(run, pattern) for pattern in patterns)]


def slots(
    options: argparse.Namespace, processes: int, *, device: str = "any"
) -> tuple[runner.Slot, ...]:
    """The machine's GPUs, or its cores."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('matrix.device is "cuda" and must find a GPU, got none; use --dry-run')
    if options.devices and not torch.cuda.is_available():
        raise ValueError(f"--devices {options.devices} must be GPUs, got none; use --jobs on a CPU")
    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {options.jobs}; raise it")
    devices = options.devices or os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices:
        devices = ",".join(map(str, range(torch.cuda.device_count())))
    if devices and torch.cuda.is_available():
        return runner.device_slots(devices.split(","), processes=processes)
    return runner.cpu_slots(options.jobs, processes=processes, cores=os.cpu_count() or 1)


def show_settings(runs: list[Run]) -> None:
    settings = differing_keys(runs)
    keys = list(next(iter(settings.values())))
    rows = [(arm, *(str(values[key]) for key in keys)) for arm, values in settings.items()]
    print(markdown_table(("arm", *keys), rows))
    print(markdown_table(("run", "folder"), [(run.name, str(run.folder)) for run in runs]))


def show_status(runs: list[Run]) -> None:
    rows = []
    for run in runs:
        state = run_state.read_state(run)
        step = f"{run_state.last_step(run.folder)}/{run.steps}"
        rows.append((run.name, state.status, step, f"{state.seconds:.0f} s", state.reason))
    print(markdown_table(("run", "status", "step", "time", "reason"), rows))


def opening(matrix: Matrix, chosen: list[Run], waiting: list[Run], how: str) -> str:
    """How many runs are to do, and why others that are not finished are left out."""
    left = [run_state.read_state(run).status for run in chosen if run not in waiting]
    text = f"{matrix.name}: {len(chosen)} runs, {len(waiting)} to do, {how}"
    if count := left.count("failed"):
        text += f"; {count} failed before (--retry-failed runs them again)"
    if count := left.count("running"):
        text += f"; {count} under way elsewhere (start again when they have ended)"
    return text


def leave(
    options: argparse.Namespace,
    matrix: Matrix,
    chosen: list[Run],
    waiting: list[Run],
    folder: Path,
) -> int:
    """Submit what is to do, or print a command for each."""
    if options.print_commands:
        for run in waiting:
            print(cluster.torchrun_line(run, processes=matrix.processes))
        return 0
    print(opening(matrix, chosen, waiting, "a job each"))
    if not waiting:
        return 0
    try:
        settings = cluster.executor_options(
            options.cluster_option,
            name=matrix.name,
            processes=matrix.processes,
            gpus=options.cluster == "slurm",
        )
        grace_s = cluster.grace_of(settings)
        jobs = [cluster.Job(run, matrix.processes, matrix.name, grace_s=grace_s) for run in waiting]
        submitted = cluster.submit(jobs, folder=folder, cluster=options.cluster, options=settings)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for run, job in zip(waiting, submitted, strict=True):
        print(f"{run.name}: job {job.job_id}, {run.folder}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("matrix", type=Path)
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder of all sweeps")
    parser.add_argument("--dry-run", action="store_true", help="resolve and list, write nothing")
    parser.add_argument("--status", action="store_true", help="what became of each run")
    parser.add_argument("--only", nargs="+", metavar="GLOB", help="arms or arm/seedN")
    parser.add_argument("--retry-failed", action="store_true")
    parser.add_argument("--devices", help="GPUs, such as 0,1; default: all visible ones")
    parser.add_argument("--cluster", choices=("slurm", "local"), help="submit through submitit")
    parser.add_argument("--cluster-option", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--print-commands", action="store_true", help="a torchrun line per run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once on a CPU")
    options = parser.parse_args()
    try:
        matrix = read_matrix(options.matrix)
        complete = resolver(matrix.processes, device=matrix.device)
        runs = resolve_runs(matrix, output=options.output, resolve=complete)
        chosen = select(runs, options.only)
        if options.dry_run:
            show_settings(chosen)
            return 0
        if options.status:
            show_status(chosen)
            return 0
        elsewhere = options.cluster or options.print_commands
        places = () if elsewhere else slots(options, matrix.processes, device=matrix.device)
        waiting = runner.to_do(chosen, retry_failed=options.retry_failed)
    except (ValueError, OSError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    folder = options.output / matrix.name
    run_state.save_runs(runs, folder)
    state_plan(matrix, folder)
    if elsewhere:
        return leave(options, matrix, chosen, waiting, folder)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(opening(matrix, chosen, waiting, f"{len(places)} at once"))
    sweep = runner.Sweep(
        waiting,
        places,
        processes=matrix.processes,
        name=matrix.name,
        retry_failed=options.retry_failed,
        show=lambda line: print(line, flush=True),
    )
    sweep.run(stop=stop)
    from titan_lowprec.titan.metrics_file import read_metrics

    results = summarise(matrix, load_histories(runs, read_metrics))
    print(f"report: {write_report(results, folder)}")
    show_status(chosen)
    return 0 if all(run_state.read_state(run).status == "finished" for run in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
