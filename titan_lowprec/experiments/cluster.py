"""A sweep's runs on a cluster: one job each through submitit, or a torchrun line each.

submitit (https://github.com/facebookincubator/submitit) queues, packs arrays and requeues; what a
job does is ``Sweep`` with this one run, so state, lock and resuming are those of a local sweep.
"""

import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan_lowprec.experiments.optional import need
from titan_lowprec.experiments.resolution import Run
from titan_lowprec.experiments.run_state import RECIPE_FILE, read_state
from titan_lowprec.experiments.runner import Command, Slot, Sweep, train_command

Cluster = Literal["slurm", "local", "debug"]
"""submitit's names: Slurm, processes of this machine, this process."""
FOLDER = "jobs"
_NEEDED = {
    "who": "sweep --cluster",
    "remedy": "pip install 'titan_lowprec[cluster]', or use --print-commands",
}
SIGNAL_DELAY_S = 90
"""submitit's default: how long before a time limit or a preemption it signals."""
SIGNAL_DELAY = "slurm_signal_delay_s"
TIMEOUTS = {"slurm_max_num_timeout": 100}
"""Time limits after which a run's job is queued again; submitit's own default is 3."""
MARGIN_S = 10.0
"""Of that delay, what is left for the note and for requeuing when the checkpoint's time is up."""
SHIELD = ["sh", "-c", "trap '' USR1 USR2; exec \"$@\"", "sh"]
"""Slurm signals every process of a step; what a shell ignores, the program that it becomes does
too. Left to its default, the signal would end a trainer without a checkpoint."""


@dataclass(frozen=True)
class Shielded:
    """A command that takes no notice of the scheduler's signals to a job."""

    command: Command

    def __call__(self, recipe: Path, processes: int) -> list[str]:
        return [*SHIELD, *self.command(recipe, processes)]


@dataclass
class Job:
    """What a node does; submitit pickles it."""

    run: Run
    processes: int
    name: str
    command: Command = train_command
    grace_s: float = SIGNAL_DELAY_S - MARGIN_S
    """Time for a checkpoint after the signal; a trainer that needs longer is killed."""

    def __call__(self) -> str:
        """Train the run to its end, from its checkpoint if there is one; its final status."""
        if read_state(self.run).status != "finished":
            self._sweep = Sweep(
                [self.run],
                [Slot("job", {})],
                processes=self.processes,
                name=self.name,
                command=Shielded(self.command),
                grace_s=self.grace_s,
            )
            self._stop = threading.Event()
            self._sweep.run(stop=self._stop)
        status = read_state(self.run).status
        if status == "failed":
            raise RuntimeError(f"{self.run.name}: {read_state(self.run).reason}")
        return status

    def checkpoint(self) -> Any:
        """submitit calls this before a job is preempted or times out: save, then requeue."""
        self._stop.set()
        self._sweep.interrupt()
        again = Job(self.run, self.processes, self.name, self.command, self.grace_s)
        return need("submitit", **_NEEDED).helpers.DelayedSubmission(again)


def submit(
    jobs: Sequence[Job], *, folder: Path, cluster: Cluster, options: Mapping[str, Any]
) -> list[Any]:
    """Queue jobs as one array.

    Args:
        jobs: What to run.
        folder: The sweep's folder; submitit writes to ``jobs`` in it.
        cluster: Where.
        options: Parameters of submitit's executor, such as ``timeout_min`` or ``slurm_partition``.

    Returns:
        submitit's jobs, in order.

    Raises:
        ValueError: submitit is not installed, or the scheduler refuses.
    """
    submitit = need("submitit", **_NEEDED)
    limits = {key: options.get(key, default) for key, default in TIMEOUTS.items()}
    executor = submitit.AutoExecutor(folder=folder / FOLDER, cluster=cluster, **limits)
    executor.update_parameters(**{k: v for k, v in options.items() if k not in limits})
    try:
        with executor.batch():
            return [executor.submit(job) for job in jobs]
    except submitit.core.utils.FailedJobError as error:
        raise ValueError(
            f"sweep: the scheduler must take jobs with {dict(options)}, got {error}; "
            "--cluster-option changes these (gpus_per_node=0 where nodes have no GPU)"
        ) from error


def executor_options(
    pairs: Sequence[str], *, name: str, processes: int, gpus: bool
) -> dict[str, Any]:
    """``KEY=VALUE`` pairs over the defaults: one node, one task, a GPU for every process.

    Raises:
        ValueError: A pair has no ``=``.
    """
    options: dict[str, Any] = {"name": name, "nodes": 1, "tasks_per_node": 1}
    if gpus:
        options["gpus_per_node"] = processes
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--cluster-option must be KEY=VALUE, got {pair!r}; write both")
        options[key] = int(value) if value.isdigit() else value
    return options


def grace_of(options: Mapping[str, Any]) -> float:
    """Seconds for a checkpoint under an executor's options.

    Raises:
        ValueError: The signal comes too late for one.
    """
    delay = options.get(SIGNAL_DELAY, SIGNAL_DELAY_S)
    if not isinstance(delay, int) or delay <= MARGIN_S:
        raise ValueError(
            f"--cluster-option {SIGNAL_DELAY} must be more than {MARGIN_S:.0f} seconds, got "
            f"{delay!r}; a checkpoint is saved in the rest of it"
        )
    return delay - MARGIN_S


def torchrun_line(run: Run, *, processes: int) -> str:
    """A command line that trains a run without this package's runner.

    Its result counts once its last step is recorded; nothing else keeps track of it.
    """
    recipe = str(run.folder / RECIPE_FILE)
    launcher = ["torchrun", "--nproc_per_node", str(processes), "-m", "torchtitan.train"]
    return shlex.join([*launcher, "--job.config", recipe])
