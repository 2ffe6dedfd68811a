"""Runs as jobs: options, commands, what a job does, and submitit's local executor."""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from titan_lowprec.experiments import cluster
from titan_lowprec.experiments.run_state import STATE_FILE, last_step, read_state
from titan_lowprec.experiments.runner import to_do


class Trainer:
    """The stand-in trainer's command line, as a value that can be pickled."""

    def __init__(self, workshop, behaviour=None):
        self.script = str(workshop.trainer(behaviour or {}))

    def __call__(self, recipe, processes):
        return [sys.executable, "-S", self.script, str(recipe)]


@pytest.fixture
def resubmission(monkeypatch):
    """In submitit's place: what a preempted job asks for, given back."""
    helpers = types.SimpleNamespace(DelayedSubmission=lambda again: again)
    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(helpers=helpers))


def job(workshop, run, behaviour=None):
    return cluster.Job(run, 1, "sweep", Trainer(workshop, behaviour))


@pytest.mark.slow
def test_a_job_trains_its_run_and_a_second_one_has_nothing_to_do(workshop):
    run = workshop.saved()[0]
    assert job(workshop, run)() == "finished"
    attempts = read_state(run).attempts
    assert job(workshop, run)() == "finished" and read_state(run).attempts == attempts == 1


@pytest.mark.slow
def test_a_job_whose_run_crashes_fails_with_the_reason(workshop):
    run = workshop.saved()[0]
    with pytest.raises(RuntimeError, match=r"recipe=bf16/seed0: status 1.* became a cabbage"):
        job(workshop, run, {run.arm: "crash"})()


@pytest.mark.slow
def test_preempted_job_interrupts_its_run_and_asks_for_a_job_that_resumes_it(
    workshop, resubmission
):
    run = workshop.saved()[0]
    first = job(workshop, run, {run.arm: "hang"})
    follower = []

    def preempt():
        while last_step(run.folder) < 2:
            time.sleep(0.01)
        follower.append(first.checkpoint())

    thread = threading.Thread(target=preempt)
    thread.start()
    assert first() == "interrupted"
    thread.join()
    workshop.trainer({})
    assert follower[0]() == "finished" and read_state(run).attempts == 2


@pytest.mark.slow
def test_a_schedulers_signal_leaves_a_note_of_the_attempt(workshop, resubmission):
    """Slurm signals the trainer too; submitit saves in a handler and then ends the process."""
    run = workshop.saved()[0]
    first = job(workshop, run, {run.arm: "hang"})

    def handle(number, frame):
        (active,) = first._sweep.active
        os.killpg(active.process.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):
            active.process.wait(0.3)
        first.checkpoint()
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGUSR2, handle)

    def preempt():
        while last_step(run.folder) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    threading.Thread(target=preempt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            first()
    finally:
        signal.signal(signal.SIGUSR2, earlier)
    noted = json.loads((run.folder / STATE_FILE).read_text())
    assert noted["status"] == "interrupted" and noted["seconds"] > 0


@pytest.mark.parametrize("option, expected", [([], 100), (["slurm_max_num_timeout=7"], 7)])
def test_a_job_is_queued_again_after_more_time_limits_than_submitit_allows(
    tmp_path, monkeypatch, option, expected
):
    made = {}

    class Executor:
        def __init__(self, **arguments):
            made["executor"] = arguments

        def update_parameters(self, **parameters):
            made["parameters"] = parameters

        batch = staticmethod(contextlib.nullcontext)

    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(AutoExecutor=Executor))
    options = cluster.executor_options(option, name="sweep", processes=1, gpus=False)
    assert cluster.submit([], folder=tmp_path, cluster="slurm", options=options) == []
    assert made["executor"]["slurm_max_num_timeout"] == expected
    assert made["parameters"] == {"name": "sweep", "nodes": 1, "tasks_per_node": 1}


def test_what_the_scheduler_refuses_is_said_with_what_was_asked(workshop, monkeypatch):
    class Refusal(RuntimeError):
        pass

    def refuse(*arguments, **options):
        raise Refusal("Invalid generic resource")

    executor = types.SimpleNamespace(
        update_parameters=lambda **parameters: None, batch=contextlib.nullcontext, submit=refuse
    )
    core = types.SimpleNamespace(utils=types.SimpleNamespace(FailedJobError=Refusal))
    made = types.SimpleNamespace(AutoExecutor=lambda **arguments: executor, core=core)
    monkeypatch.setitem(sys.modules, "submitit", made)
    asked = r"'gpus_per_node': 8.*Invalid generic resource; --cluster-option changes these"
    with pytest.raises(ValueError, match=asked):
        cluster.submit(
            [job(workshop, workshop.saved()[0])],
            folder=workshop.folder,
            cluster="slurm",
            options={"gpus_per_node": 8},
        )


def test_a_checkpoint_has_the_time_between_signal_and_limit():
    assert cluster.grace_of({}) == 80
    assert cluster.grace_of({"slurm_signal_delay_s": 600}) == 590
    for late in (10, "soon"):
        with pytest.raises(ValueError, match=r"slurm_signal_delay_s must be more than 10"):
            cluster.grace_of({"slurm_signal_delay_s": late})


def test_options_are_submitits_over_one_node_with_a_gpu_per_process():
    options = cluster.executor_options(
        ["timeout_min=60", "slurm_partition=a=b"], name="sweep", processes=8, gpus=True
    )
    assert options == {
        "name": "sweep",
        "nodes": 1,
        "tasks_per_node": 1,
        "gpus_per_node": 8,
        "timeout_min": 60,
        "slurm_partition": "a=b",
    }
    with pytest.raises(ValueError, match=r"KEY=VALUE, got 'partition'"):
        cluster.executor_options(["partition"], name="sweep", processes=1, gpus=False)


def test_torchrun_line_is_the_literal_command(workshop):
    run = workshop.saved()[0]
    words = shlex.split(cluster.torchrun_line(run, processes=8))
    assert words[:5] == ["torchrun", "--nproc_per_node", "8", "-m", "torchtitan.train"]
    assert words[5:] == ["--job.config", str(run.folder / "recipe.toml")]


def test_run_started_by_hand_counts_once_its_last_step_is_recorded(workshop):
    run = workshop.saved()[0]
    workshop.record(run, [1.0] * 4)
    (run.folder / "state.json").unlink()
    assert read_state(run).status == "new"
    workshop.record(run, [1.0] * 5)
    (run.folder / "state.json").unlink()
    assert read_state(run).status == "finished" and run not in to_do([run], retry_failed=True)


def test_missing_submitit_is_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install 'titan_lowprec\[cluster\]'"):
        cluster.submit([], folder=tmp_path, cluster="slurm", options={})


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None,
    reason="submitit is not installed: pip install 'titan_lowprec[cluster]'",
)
def test_submitit_runs_jobs_in_processes_of_their_own(workshop):
    runs = workshop.saved()[:2]
    options = cluster.executor_options(["timeout_min=5"], name="sweep", processes=1, gpus=False)
    jobs = [job(workshop, run) for run in runs]
    submitted = cluster.submit(jobs, folder=workshop.folder, cluster="local", options=options)
    assert [one.result() for one in submitted] == ["finished"] * 2
    assert [read_state(run).status for run in runs] == ["finished"] * 2
