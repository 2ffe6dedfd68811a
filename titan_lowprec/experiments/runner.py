"""Run a sweep on this machine: in parallel on its devices, resumable, past arms that crash."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from titan_lowprec.experiments.resolution import Run
from titan_lowprec.experiments.run_state import (
    LOG_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    State,
    failure_reason,
    file_size,
    last_step,
    read_state,
    steps_since,
    take_lock,
    write_state,
)

TRAINER = "titan_lowprec.train"
SIGNALLED = {-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT}
"""Statuses of a run that was told to stop and can go on from its checkpoint."""
Command = Callable[[Path, int], list[str]]
"""Command line that trains a recipe with a number of processes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one run at a time works."""

    name: str
    environment: Mapping[str, str]


@dataclass(slots=True)
class Active:
    """A run that is under way."""

    run: Run
    slot: Slot
    process: subprocess.Popen[bytes]
    begun: float
    earlier_bytes: int
    """Of ``metrics.jsonl`` when this attempt began."""
    log_bytes: int = 0
    """Of the log then."""
    lock: int | None = None
    """Held until the run's end is noted, so that no other sweep starts it in between."""

    @property
    def steps_done(self) -> int:
        """Steps of this attempt, repeated ones included."""
        return steps_since(self.run.folder, self.earlier_bytes)


def train_command(recipe: Path, processes: int) -> list[str]:
    """The trainer's command line, under torchrun for more than one process."""
    launcher = [sys.executable, "-m"]
    if processes > 1:
        torchrun = ("torch.distributed.run", "--nproc_per_node", str(processes))
        rendezvous = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0")
        launcher += [*torchrun, *rendezvous, "-m"]
    return [*launcher, TRAINER, "--job.config", str(recipe)]


def device_slots(devices: Sequence[str], *, processes: int) -> tuple[Slot, ...]:
    """Groups of ``processes`` devices; a rest too small for a run stays idle.

    Raises:
        ValueError: There are fewer devices than a run needs.
    """
    if len(devices) < processes:
        raise ValueError(
            f"sweep: a run needs {processes} devices (matrix.processes), got {len(devices)}; "
            "name more or lower matrix.processes"
        )
    groups = [devices[i : i + processes] for i in range(0, len(devices) - processes + 1, processes)]
    return tuple(
        Slot(f"GPU {','.join(group)}", {"CUDA_VISIBLE_DEVICES": ",".join(group)})
        for group in groups
    )


def cpu_slots(jobs: int, *, processes: int, cores: int) -> tuple[Slot, ...]:
    """``jobs`` runs at once that share the cores."""
    threads = str(max(1, cores // (jobs * processes)))
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}
    return tuple(Slot(f"CPU {number}", environment) for number in range(jobs))


def to_do(runs: Sequence[Run], *, retry_failed: bool) -> list[Run]:
    """New, interrupted and, if wanted, failed runs; all arms of a seed before the next seed."""
    wanted = {"new", "interrupted", *(("failed",) if retry_failed else ())}
    chosen = [run for run in runs if read_state(run).status in wanted]
    seeds = list(dict.fromkeys(run.seed for run in runs))
    return sorted(chosen, key=lambda run: seeds.index(run.seed))


class Sweep:
    """Runs under way and those that wait.

    Args:
        runs: What to run, in order; their recipes are written (``run_state.save_runs``).
        slots: Where.
        processes: Processes of one run.
        name: Group under which wandb shows the runs.
        command: Command line of a run.
        retry_failed: Whether a run that has failed by its turn, in another sweep too, is run again.
        show: Takes a line of progress.
        grace_s: Seconds a run has to save its checkpoint before it is killed.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        slots: Sequence[Slot],
        *,
        processes: int,
        name: str,
        command: Command = train_command,
        retry_failed: bool = True,
        show: Callable[[str], None] = print,
        grace_s: float = 120.0,
    ) -> None:
        self.waiting = deque(runs)
        self.free = list(slots)
        self.slots = len(self.free)
        self.active: list[Active] = []
        self.processes, self.name, self.command, self.show = processes, name, command, show
        self.retry_failed, self.grace_s = retry_failed, grace_s
        self.total = len(self.waiting)
        self.failed: list[str] = []
        self.done = 0
        self.begun = time.monotonic()
        self.steps_done = 0
        self.stopped = False
        self._collecting = threading.RLock()

    def run(
        self,
        *,
        stop: threading.Event,
        poll_s: float = 1.0,
        show_s: float = 30.0,
    ) -> bool:
        """Run everything; a crash ends its arm alone.

        Args:
            stop: When set, runs are told to save a checkpoint and end, and none is started.
            poll_s: Seconds between looks at the processes.
            show_s: Seconds between lines of progress.

        Returns:
            Whether every run finished.
        """
        shown = time.monotonic()
        while (self.waiting and not stop.is_set()) or self.active:
            while self.waiting and self.free and not stop.is_set():
                self._start(self.waiting.popleft())
            changed = self.interrupt() if stop.is_set() else self._collect(stopping=False)
            if changed or time.monotonic() - shown >= show_s:
                self.show(self.progress())
                shown = time.monotonic()
            if self.active:
                stop.wait(poll_s)
        return self.done == self.total

    def progress(self) -> str:
        """A line: runs done and failed, steps of those under way, time left."""
        running = ", ".join(
            f"{active.run.name} {last_step(active.run.folder)}/{active.run.steps} on "
            f"{active.slot.name}"
            for active in self.active
        )
        failed = f", {len(self.failed)} failed" if self.failed else ""
        rest = f"time left: {self.time_left()}"
        if self.stopped:
            rest = "stopped, the same command continues"
        return (
            f"{self.done}/{self.total} runs finished{failed}; running: {running or 'none'}; {rest}"
        )

    def time_left(self) -> str:
        """From the pace of all steps since the sweep was started."""
        done = self.steps_done + sum(item.steps_done for item in self.active)
        runs = [*(item.run for item in self.active), *self.waiting]
        left = sum(max(0, run.steps - last_step(run.folder)) for run in runs)
        if left == 0:
            return "0:00:00"
        if done == 0:
            return "unknown"
        return str(timedelta(seconds=round(left * (time.monotonic() - self.begun) / done)))

    def _start(self, run: Run) -> None:
        lock = take_lock(run.folder)
        if lock is None:
            self.show(f"{run.name}: another sweep is running it; left to that one")
            return
        earlier, reached = read_state(run), last_step(run.folder)
        failed = earlier.status == "failed" and not self.retry_failed
        if failed or earlier.status == "finished":
            os.close(lock)
            self.done += not failed
            self.show(
                f"{run.name}: another sweep has {'seen it fail' if failed else 'finished it'}"
            )
            return
        metrics_bytes = file_size(run.folder / METRICS_FILE)
        log_bytes = file_size(run.folder / LOG_FILE)
        slot = self.free.pop(0)
        write_state(run, replace(earlier, status="running", attempts=earlier.attempts + 1))
        environment = {
            **os.environ,
            "WANDB_RUN_GROUP": self.name,
            "WANDB_RUN_TAGS": run.arm,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(0.9 * self.grace_s)),  # torchrun's is 30
            **slot.environment,
        }
        with (run.folder / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                self.command(run.folder / RECIPE_FILE, self.processes),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),  # the run keeps the lock, also if this process dies
                start_new_session=True,  # Ctrl-C reaches this process alone, which tells the runs
            )
        begun = time.monotonic()
        self.active.append(Active(run, slot, process, begun, metrics_bytes, log_bytes, lock))
        how = f"continues, had reached step {reached}" if reached else "started"
        self.show(f"{run.name}: {how}")

    def interrupt(self) -> bool:
        """End all runs, politely first, and note what became of them; whether there were any."""
        self.stopped = True
        for active in self.active:
            if active.process.poll() is None:
                active.process.terminate()
        end = time.monotonic() + self.grace_s
        for active in self.active:
            try:
                active.process.wait(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(active.process.pid, signal.SIGKILL)
                active.process.wait()
        return self._collect(stopping=True)

    def _collect(self, *, stopping: bool) -> bool:
        """Note the runs that ended, each once, also if a signal asks meanwhile; if any did."""
        with self._collecting:
            ended = [active for active in self.active if active.process.poll() is not None]
            for active in ended:
                if active in self.active:
                    self.active.remove(active)
                    self.free.append(active.slot)
                    self._note(active, stopping=stopping)
        return bool(ended)

    def _note(self, active: Active, *, stopping: bool) -> None:
        run, status = active.run, active.process.returncode
        step = last_step(run.folder)
        self.steps_done += active.steps_done
        state = replace(
            read_state_of(run),
            exit_status=status,
            seconds=read_state_of(run).seconds + time.monotonic() - active.begun,
            reason="",
        )
        if status == 0 and step >= run.steps:
            self.done += 1
            state = replace(state, status="finished")
        elif stopping or status in SIGNALLED:
            state = replace(state, status="interrupted")
        else:
            reason = failure_reason(run.folder, status=status, since=active.log_bytes)
            state = replace(
                state, status="failed", reason=f"status {status}, step {step}: {reason}"
            )
            self.failed.append(run.name)
        write_state(run, state)
        if active.lock is not None:
            os.close(active.lock)
        self.show(f"{run.name}: {state.status}" + (f", {state.reason}" if state.reason else ""))


def read_state_of(run: Run) -> State:
    """The state as a run that was just started left it."""
    state = read_state(run)
    assert state.status != "new", f"{run.name} was started without a state"
    return state
