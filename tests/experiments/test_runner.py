"""The runner with a stand-in trainer: skip, resume, survive, stop, tell progress."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.experiments.conftest import kill_at_step, stop_at_step
from titan_lowprec.experiments.run_state import (
    failure_reason,
    file_size,
    is_locked,
    last_step,
    read_state,
    take_lock,
    write_state,
)
from titan_lowprec.experiments.runner import (
    Active,
    Slot,
    Sweep,
    cpu_slots,
    device_slots,
    to_do,
    train_command,
)


def statuses(runs):
    return [read_state(run).status for run in runs]


def test_all_runs_finish_and_a_second_start_has_nothing_to_do(workshop):
    runs = workshop.saved()
    good, shown = workshop.sweep(runs, slots=2)
    assert good and statuses(runs) == ["finished"] * 4
    assert shown[-1].startswith("4/4 runs finished; running: none; time left: 0:00:00")
    assert to_do(runs, retry_failed=True) == []


def test_a_run_that_another_sweep_finished_meanwhile_is_not_started_again(workshop):
    runs = workshop.saved()
    workshop.sweep(runs[:1])
    good, shown = workshop.sweep(runs[:2])  # a list from before the first sweep ended
    assert good and shown[0] == f"{runs[0].name}: another sweep has finished it"
    assert read_state(runs[0]).attempts == 1 and read_state(runs[1]).status == "finished"


def test_crashing_arm_fails_with_its_error_and_the_others_finish(workshop):
    runs = workshop.saved()
    good, _ = workshop.sweep(runs, behaviour={"recipe=bf16": "crash"})
    assert not good
    assert statuses(runs) == ["failed", "failed", "finished", "finished"]
    state = read_state(runs[0])
    assert state.reason == "status 1, step 2: RuntimeError: loss became a cabbage"
    assert (state.exit_status, state.attempts) == (1, 1)
    assert to_do(runs, retry_failed=False) == []
    assert to_do(runs, retry_failed=True) == list(runs[:2])


def test_retried_run_continues_from_its_checkpoint(workshop):
    runs = workshop.saved()
    workshop.sweep(runs[:1], behaviour={"recipe=bf16": "crash"})
    good, shown = workshop.sweep(runs[:1])
    assert good and "continues, had reached step 2" in shown[0]
    lines = (runs[0].folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert read_state(runs[0]).attempts == 2


def test_trainer_that_ends_early_with_status_zero_has_failed(workshop):
    runs = workshop.saved()
    (runs[0].folder / "recipe.toml").write_text(
        (runs[0].folder / "recipe.toml").read_text().replace("steps = 5", "steps = 4")
    )
    workshop.sweep(runs[:1])
    assert read_state(runs[0]).reason == "status 0, step 4: no output"


def test_stop_interrupts_runs_and_the_next_start_resumes_them(workshop):
    runs = workshop.saved()
    stop = threading.Event()

    watcher = threading.Thread(target=stop_at_step, args=(stop, runs[0], 2))
    watcher.start()
    good, shown = workshop.sweep(runs, stop=stop, behaviour={"recipe=bf16": "hang"})
    watcher.join()
    assert not good
    assert shown[-1] == ("0/4 runs finished; running: none; stopped, the same command continues")
    assert statuses(runs) == ["interrupted", "new", "new", "new"]
    assert workshop.sweep(to_do(runs, retry_failed=False))[0]
    assert statuses(runs) == ["finished"] * 4


def test_run_of_a_killed_sweep_is_running_while_it_lives_and_interrupted_after(workshop):
    run = workshop.saved()[0]
    workshop.record(run, [1.0], status="running")
    lock = take_lock(run.folder)
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=-1, pass_fds=(lock,))
    os.close(lock)
    try:
        assert read_state(run).status == "running" and to_do([run], retry_failed=True) == []
        _, shown = workshop.sweep([run])
        assert shown[0] == "recipe=bf16/seed0: another sweep is running it; left to that one"
        assert read_state(run).attempts == 0
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert not is_locked(run.folder)
    assert read_state(run).status == "interrupted"


def test_folder_of_another_configuration_is_refused(workshop):
    run = workshop.saved()[0]
    workshop.record(run, [1.0])
    state = run.folder / "state.json"
    state.write_text(state.read_text().replace(run.hash, "0" * 64))
    with pytest.raises(ValueError, match=r"must belong to configuration .*got 0000"):
        read_state(run)


def test_time_left_comes_from_the_pace_of_the_sweep(workshop):
    runs = workshop.saved()
    _, shown = workshop.sweep(runs[:2])
    after_one = next(line for line in shown if line.startswith("1/2"))
    assert "time left: 0:00:0" in after_one  # five steps took well under ten seconds


def test_steps_that_a_resumed_run_repeats_count_for_the_pace(workshop, monkeypatch):
    """Four steps of five were recorded, the checkpoint is of step 2; 3 and 4 were done again."""
    runs = workshop.saved()[:2]
    workshop.record(runs[0], [1.0] * 4, status="interrupted")
    sweep = Sweep([runs[1]], [], processes=1, name="sweep")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    active = Active(
        runs[0], Slot("CPU 0", {}), process, 0.0, file_size(runs[0].folder / "metrics.jsonl")
    )
    sweep.active.append(active)
    sweep.begun = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: 120.0)
    assert sweep.time_left() == "unknown"
    with (runs[0].folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "resume", "step": 2}\n')
        file.write("".join(f'{{"kind": "train", "step": {step}}}\n' for step in (3, 4)))
        file.write('{"kind": "train", "st')
    assert active.steps_done == 2
    assert sweep.time_left() == "0:01:00"  # 10 s a step, one here and five there


def test_all_arms_of_a_seed_come_before_the_next_seed(workshop):
    assert [run.name for run in to_do(workshop.saved(), retry_failed=False)] == [
        "recipe=bf16/seed0",
        "recipe=mxfp8/seed0",
        "recipe=bf16/seed1",
        "recipe=mxfp8/seed1",
    ]


def test_eight_devices_hold_two_runs_of_three_processes():
    slots = device_slots([str(i) for i in range(8)], processes=3)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0,1,2", "3,4,5"]
    with pytest.raises(ValueError, match=r"a run needs 3 devices .* got 2"):
        device_slots(["0", "1"], processes=3)


def test_cpu_runs_share_the_cores():
    slots = cpu_slots(2, processes=1, cores=8)
    assert [slot.environment["OMP_NUM_THREADS"] for slot in slots] == ["4", "4"]


def test_command_uses_torchrun_for_several_processes(tmp_path):
    assert "torch.distributed.run" not in train_command(tmp_path / "r.toml", 1)
    several = train_command(tmp_path / "r.toml", 4)
    assert several[several.index("--nproc_per_node") + 1] == "4"


def test_last_step_ignores_a_half_written_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 7}\n{"kind": "tr')
    assert last_step(tmp_path) == 7


def test_reason_is_the_error_even_if_other_lines_follow(tmp_path):
    (tmp_path / "log.txt").write_text("x\na.b.OutOfMemoryError: 2 GiB\n[rank0] bye\n")
    assert failure_reason(tmp_path, status=1) == "a.b.OutOfMemoryError: 2 GiB"


def test_reason_of_an_attempt_is_not_what_an_earlier_one_said(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("ValueError: of the first attempt\n")
    earlier = file_size(log)
    assert failure_reason(tmp_path, status=1, since=earlier) == "no output"
    log.write_text(log.read_text() + "step 1\n")
    assert failure_reason(tmp_path, status=1, since=earlier) == "step 1"


@pytest.mark.slow
def test_run_killed_from_outside_says_by_what_and_not_the_last_attempts_error(workshop):
    run = workshop.saved()[0]
    workshop.sweep([run], behaviour={"recipe=bf16": "crash"})
    killer = threading.Thread(target=kill_at_step, args=(run, 4))
    killer.start()
    good, _ = workshop.sweep([run], behaviour={"recipe=bf16": "hang late"})
    killer.join()
    assert not good and read_state(run).status == "failed"
    assert read_state(run).reason == "status -9, step 4: killed by SIGKILL"


@pytest.mark.slow
def test_run_that_another_sweep_saw_fail_is_run_again_only_if_wanted(workshop):
    runs = workshop.saved()[:1]
    workshop.sweep(runs, behaviour={"recipe=bf16": "crash"})
    good, shown = workshop.sweep(runs, retry_failed=False)
    assert not good and shown[0] == "recipe=bf16/seed0: another sweep has seen it fail"
    assert read_state(runs[0]).attempts == 1
    assert workshop.sweep(runs, retry_failed=True)[0]


def test_lock_is_held_until_the_end_of_a_run_is_noted(workshop, monkeypatch):
    """Between a run's end and its note, another sweep must not take it for interrupted."""
    run = workshop.saved()[0]
    locked = []

    def note(run, state):
        locked.append((state.status, is_locked(run.folder)))
        write_state(run, state)

    monkeypatch.setattr("titan_lowprec.experiments.runner.write_state", note)
    assert workshop.sweep([run])[0]
    assert locked == [("running", True), ("finished", True)] and not is_locked(run.folder)


@pytest.mark.slow
def test_two_sweeps_at_once_run_each_run_once(workshop):
    runs = workshop.saved()
    ends = []
    sweeps = [
        threading.Thread(target=lambda: ends.append(workshop.sweep(runs, slots=2))) for _ in "ab"
    ]
    for sweep in sweeps:
        sweep.start()
    for sweep in sweeps:
        sweep.join()
    assert [read_state(run).attempts for run in runs] == [1] * 4
    assert statuses(runs) == ["finished"] * 4
    assert not list((workshop.folder / "out").rglob("*.tmp"))


def test_a_run_knows_its_group_and_its_processes_get_the_time_of_a_checkpoint(workshop):
    run = workshop.saved()[0]
    names = ("WANDB_RUN_GROUP", "WANDB_RUN_TAGS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    script = f"import os; print([os.environ[name] for name in {names}])"
    sweep = Sweep(
        [run],
        [Slot("CPU 0", {})],
        processes=2,
        name="mine",
        command=lambda recipe, processes: [sys.executable, "-c", script],
        grace_s=100.0,
    )
    sweep.run(stop=threading.Event(), poll_s=0.02)
    assert (run.folder / "log.txt").read_text() == f"['mine', '{run.arm}', '90']\n"
