import json
import os
import time

import pytest
import torch

from titan_lowprec.titan import trackers
from titan_lowprec.titan.run_record import collect_versions


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


def test_wandb_without_variables_has_group_tags_config_versions_and_commit(
    build, fake_wandb, config
):
    config.model.name, config.model.flavor = "llama3_lowprec", "tiny"
    config.attention.recipe = "nvfp4_mixed"
    build()
    (options,) = fake_wandb
    assert options["group"] == "llama3_lowprec"
    assert options["tags"] == ["tiny", "nvfp4_mixed"]
    assert {"commit", "dirty", "torch", "device", "command"} <= options["config"]["versions"].keys()


def test_a_validation_round_has_its_tokens_beside_it_at_any_step(build, fake_wandb, record):
    """wandb draws against tokens only what was logged with them; step 3 is not a log step."""
    processor = build()
    for step in (1, 2, 3):
        processor.log_step(record(step, valid_tokens_seen=6 * step))
    processor.log_validation_record(3, 4.0, 10)
    (tracker,) = processor._trackers
    step, scalars = tracker._run.logged[-1]
    assert (step, scalars["validation_metrics/loss"], scalars["valid_tokens_seen"]) == (3, 4.0, 18)


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


def test_online_without_a_key_stops_before_training_and_says_what_to_do(
    build, wandb_environment, config
):
    """The real wandb, which would ask a port where nobody listens."""
    wandb_environment.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    config.metrics.enable_wandb = True
    config.metrics.wandb_mode = "online"
    with pytest.raises(RuntimeError, match=r"mode online.*key.*--metrics\.wandb_mode offline"):
        build()


def test_a_wandb_that_fails_later_is_said_once_and_leaves_the_metrics(
    build, fake_wandb, config, tmp_path, record, caplog
):
    config.metrics.log_freq = 1
    processor = build()
    (tracker,) = processor._trackers
    asked = []

    def fail(scalars, step):
        asked.append(step)
        raise ConnectionError("the service has gone")

    def finish(exit_code):
        raise BrokenPipeError("so has its pipe")

    tracker._run.log, tracker._run.finish = fail, finish
    with caplog.at_level("ERROR"):
        for step in (1, 2, 3):
            processor.log_step(record(step))
        processor.close()
    errors = [line.getMessage() for line in caplog.records if line.levelname == "ERROR"]
    assert len(errors) == 2 and "log step 1" in errors[0] and "service has gone" in errors[0]
    assert "finish its run" in errors[1] and asked == [1]
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3]


def wandb_records(data):
    """Records of an offline run: LevelDB's log format behind a header of seven bytes.

    Of a file that is still being written, those that are whole.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    place, parts = 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + size > len(data):
            return
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@pytest.mark.slow
def test_an_offline_wandb_run_holds_config_group_tags_versions_commit_and_history(
    build, wandb_environment, config, tmp_path, record
):
    config.metrics.enable_wandb = True
    for name, value in {"MODE": "offline", "RUN_GROUP": "sweep", "RUN_TAGS": "fp8,packed"}.items():
        wandb_environment.setenv(f"WANDB_{name}", value)
    config.attention.recipe = "mxfp8"
    processor = build()
    for step in range(1, 11):
        processor.log_step(record(step))
    processor.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert file.stem == f"run-{trackers.run_id(tmp_path, '')}"
    deadline = time.monotonic() + 20  # wandb's writer process flushes a moment after finish()
    while not any(item.HasField("exit") for item in wandb_records(file.read_bytes())):
        assert time.monotonic() < deadline, file.read_bytes()[:200]
        time.sleep(0.05)
    data = file.read_bytes()
    records = list(wandb_records(data))
    for end in range(7, len(data), 97):  # as the loop above may find it
        written = list(wandb_records(data[:end]))
        assert written == records[: len(written)]
    run = next(item.run for item in records if item.HasField("run"))
    assert (run.run_group, set(run.tags)) == ("sweep", {"fp8", "packed"})
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["attention"]["recipe"] == "mxfp8" and settings["training"]["seq_len"] == 8
    assert settings["versions"] == collect_versions()
    assert settings["versions"]["torch"] == torch.__version__ and "commit" in settings["versions"]
    history = [
        {key: item.value_json for item in entry.history.item for key in item.nested_key}
        for entry in records
        if entry.HasField("history")
    ]
    assert [json.loads(row["loss_metrics/global_avg_loss"]) for row in history] == [2.5] * 3
