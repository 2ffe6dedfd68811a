import os
import time

import pytest
import torch

from titan_lowprec.titan import trackers


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_has_the_stock_names_and_loses_superseded_steps(
    build, tmp_path, config, record
):
    config.metrics.enable_tensorboard = True
    config.metrics.log_freq = 1
    first = build()
    for step in (1, 2, 3, 4):
        first.log_step(record(step, loss=1.0))
    first.log_validation_record(4, 4.0, 10)
    first.close()
    second = build()
    second.resume_at(2)
    for step in (3, 4):
        second.log_step(record(step, loss=2.0))
    second.close()
    scalars = events(tmp_path / "tb")
    assert scalars["loss_metrics/global_avg_loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    stock = {"grad_norm", "throughput(tps)", "tflops", "lr", "n_tokens_seen"}
    stock |= {"memory/max_reserved(GiB)", "time_metrics/end_to_end(s)"}
    assert stock <= scalars.keys()
    assert "mfu(%)" not in scalars


@pytest.fixture
def wandb_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    return monkeypatch


def test_wandb_auto_is_offline_without_a_key_and_online_with_one(wandb_environment, tmp_path):
    assert trackers.resolve_wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert trackers.resolve_wandb_mode("auto") == "online"
    wandb_environment.setenv("WANDB_MODE", "disabled")
    assert trackers.resolve_wandb_mode("auto") == "disabled"
    assert trackers.resolve_wandb_mode("offline") == "offline"


def test_wandb_auto_sees_a_key_in_the_environment(wandb_environment):
    wandb_environment.setenv("WANDB_API_KEY", "x")
    assert trackers.resolve_wandb_mode("auto") == "online"


class FakeRun:
    id, dir = "id", "dir"

    def __init__(self):
        self.logged, self.exit_code = [], None

    def log(self, scalars, step):
        self.logged.append((step, scalars))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def fake_wandb(wandb_environment, config):
    import wandb

    config.metrics.enable_wandb = True
    calls = []

    def init(**options):
        calls.append(options)
        return FakeRun()

    wandb_environment.setattr(wandb, "init", init)
    return calls


def test_wandb_takes_stock_variables_and_splits_tags(build, fake_wandb, wandb_environment, config):
    for name, value in {
        "WANDB_TEAM": "team",
        "WANDB_PROJECT": "project",
        "WANDB_RUN_GROUP": "group",
        "WANDB_RUN_TAGS": "fp8, packed,",
    }.items():
        wandb_environment.setenv(name, value)
    config.metrics.run_name = "arm-1"
    build()
    (options,) = fake_wandb
    assert options["entity"] == "team"
    assert options["project"] == "project"
    assert options["group"] == "group"
    assert options["tags"] == ["fp8", "packed"]
    assert options["name"] == "arm-1"
    assert options["mode"] == "offline"
    assert options["resume"] == "allow"
    assert options["config"]["training"]["seq_len"] == 8
    assert options["config"]["versions"]["torch"] == torch.__version__


def test_a_restart_has_the_same_wandb_id_and_another_run_another(
    build, fake_wandb, config, tmp_path
):
    build()
    build()
    config.metrics.run_name = "other"
    build()
    config.job.dump_folder = str(tmp_path / "elsewhere")
    build()
    same, again, renamed, moved = (options["id"] for options in fake_wandb)
    assert same == again
    assert len({same, renamed, moved}) == 3


def test_a_crash_marks_the_wandb_run_as_failed(build, fake_wandb):
    good, bad = build(), build()
    (good_tracker,), (bad_tracker,) = good._trackers, bad._trackers
    good.close()
    try:
        raise RuntimeError
    except RuntimeError:
        bad.close()
    assert good_tracker._run.exit_code == 0
    assert bad_tracker._run.exit_code == 1


def test_a_wandb_that_does_not_start_stops_the_run_with_a_remedy(build, wandb_environment, config):
    import wandb

    def fail(**options):
        raise OSError("no route to host")

    config.metrics.enable_wandb = True
    wandb_environment.setattr(wandb, "init", fail)
    with pytest.raises(RuntimeError, match=r"--metrics\.wandb_mode offline"):
        build()


def test_a_disabled_wandb_is_not_started(build, fake_wandb, config):
    config.metrics.wandb_mode = "disabled"
    build()
    assert fake_wandb == []


@pytest.mark.slow
def test_an_offline_wandb_run_writes_its_history(
    build, wandb_environment, config, tmp_path, record
):
    config.metrics.enable_wandb = True
    wandb_environment.setenv("WANDB_MODE", "offline")
    processor = build()
    for step in range(1, 11):
        processor.log_step(record(step))
    processor.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (history,) = run.glob("*.wandb")
    assert history.stem == f"run-{trackers.run_id(tmp_path, '')}"
    deadline = time.monotonic() + 20  # wandb's writer process flushes a moment after finish()
    while b"loss_metrics/global_avg_loss" not in history.read_bytes():
        assert time.monotonic() < deadline, history.read_bytes()[:200]
        time.sleep(0.05)
