import dataclasses
import json
import logging
import math
import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from titan_lowprec import _autoload

_autoload.assume_cpu_without_accelerator()

from torchtitan.config import ConfigManager, JobConfig  # noqa: E402

from titan_lowprec.titan import flops, job_config, metrics, trackers  # noqa: E402
from titan_lowprec.titan.memory_monitor import CpuMemoryMonitor  # noqa: E402
from titan_lowprec.titan.metrics import StepRecord, build_metrics_processor  # noqa: E402
from titan_lowprec.titan.metrics_file import MetricsFile, read_metrics  # noqa: E402

CONFIG = ConfigManager._merge_configs(JobConfig, job_config.JobConfig)
RECORD = StepRecord(
    step=1,
    loss=2.5,
    grad_norm=1.25,
    lr=1e-3,
    tokens_seen=16,
    valid_tokens_seen=6,
    valid_tokens=6,
    rows=2,
    documents=2,
    padding_tokens=8,
    attention_pairs=21,
    skipped_steps=0,
    fingerprint="00000000000000ff",
    data_wait_s=0.25,
)


def record(step, **changes):
    return dataclasses.replace(RECORD, step=step, **changes)


@pytest.fixture
def config(tmp_path):
    config = CONFIG()
    config.job.dump_folder = str(tmp_path)
    config.training.steps = 10
    config.training.seq_len = 8
    config.metrics.log_freq = 5
    config.metrics.disable_color_printing = True
    return config


@pytest.fixture
def build(config):
    built = []

    def build():
        dims = SimpleNamespace(world_size=2, non_data_parallel_size=1)
        args = SimpleNamespace(n_heads=2, head_dim=16, n_layers=2)
        processor = build_metrics_processor(config, dims, args)
        processor.model_parts = [nn.Linear(10, 100)]
        built.append(processor)
        return processor

    yield build
    for processor in built:
        processor.close()


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def steps(tmp_path, kind="train"):
    return [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl", kind=kind)]


# ---- the line of a step -----------------------------------------------------------------------


def test_every_step_is_a_line_with_every_figure_of_the_record(build, tmp_path):
    processor = build()
    for step in range(1, 5):
        processor.log_step(record(step))
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [1, 2, 3, 4]
    for name, value in dataclasses.asdict(RECORD).items():
        if name != "step":
            assert written[0][name] == value
    assert written[0]["kind"] == "train"
    assert written[0]["documents_per_row"] == 1.0
    assert written[0]["padding_fraction"] == 0.5
    assert written[0]["memory_gib"] > 0
    assert written[0]["time"] > 1.6e9


def test_a_line_is_on_disk_before_the_step_returns(build, tmp_path):
    build().log_step(record(1))
    assert len(lines(tmp_path)) == 1  # the processor is still open


def test_throughput_counts_valid_tokens_over_the_step_alone(build, clock, tmp_path):
    processor = build()
    clock(50)
    processor.begin_step()
    clock(2)
    processor.log_step(record(1))
    processor.begin_step()
    clock(4)
    processor.log_step(record(2))
    assert [line["step_time_s"] for line in lines(tmp_path)] == [2, 4]
    assert [line["valid_tokens_per_s"] for line in lines(tmp_path)] == [3.0, 1.5]


def test_the_time_of_a_validation_round_counts_for_no_training_step(build, clock, tmp_path):
    processor = build()
    clock(1)
    processor.log_step(record(1))
    clock(1000)
    processor.log_validation_record(1, 3.5, 77)
    clock(1)
    processor.log_step(record(2))
    assert [
        line["step_time_s"] for line in read_metrics(tmp_path / "metrics.jsonl", kind="train")
    ] == [1, 1]


def test_mfu_of_a_two_document_pack_by_hand(build, clock, tmp_path):
    processor = build()
    processor.peak = flops.Peak("test chip", 1e5)
    clock(2)
    processor.log_step(record(1))
    (line,) = lines(tmp_path)
    # two documents of 3 and 5 tokens: 8 tokens x 6 x 1,000 weights + 12 x 21 x 2 x 16 x 2 layers
    useful = 48_000 + 16_128
    assert line["mfu"] == pytest.approx(useful / 2 / (2 * 1e5), rel=1e-12)
    assert line["peak_name"] == "test chip"
    assert line["tflops_per_device"] == pytest.approx(useful / 2 / 2 / 1e12, rel=1e-12)


def test_mfu_of_an_unknown_device_is_null_with_one_warning(build, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        processor = build()
        for step in range(1, 6):
            processor.log_step(record(step))
    assert {line["mfu"] for line in lines(tmp_path)} == {None}
    assert {line["peak_name"] for line in lines(tmp_path)} == {None}
    warnings = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "MFU is not reported" in warnings[0].getMessage()


def test_non_finite_figures_are_valid_json_and_read_back_as_they_were(build, tmp_path):
    build().log_step(record(1, loss=math.nan, grad_norm=math.inf))
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (line,) = read_metrics(tmp_path / "metrics.jsonl", kind="train")
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == math.inf
    assert "non_finite" not in line


@pytest.mark.parametrize("fingerprint", ["ff", "00000000000000FF", "-0000000000000ff", 255])
def test_a_fingerprint_that_is_no_16_hexadecimal_digits_is_refused(fingerprint):
    with pytest.raises((ValueError, TypeError), match=r"fingerprint|string"):
        record(1, fingerprint=fingerprint)


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECORD.loss = 0.0


def test_other_ranks_write_nothing(build, tmp_path, monkeypatch, config):
    config.metrics.enable_tensorboard = True
    monkeypatch.setattr(metrics, "rank", lambda: 1)
    processor = build()
    processor.resume_at(0)
    processor.log_step(record(1))
    processor.log_validation_record(1, 1.0, 1)
    assert list(tmp_path.iterdir()) == []


# ---- resume and crashes -----------------------------------------------------------------------


def test_resume_supersedes_later_steps_of_earlier_attempts(build, tmp_path):
    first = build()
    for step in range(1, 9):
        first.log_step(record(step))
    first.log_validation_record(8, 9.0, 1)
    first.close()
    second = build()
    second.resume_at(5)
    for step in range(6, 11):
        second.log_step(record(step, loss=7.0))
    second.log_validation_record(10, 3.0, 5)
    assert steps(tmp_path) == list(range(1, 11))
    effective = read_metrics(tmp_path / "metrics.jsonl", kind="train")
    assert [line["loss"] for line in effective] == [2.5] * 5 + [7.0] * 5
    assert [line["attempt"] for line in effective] == [1] * 5 + [2] * 5
    assert steps(tmp_path, "validation") == [10]
    assert {"kind": "resume", "step": 5, "attempt": 2} in lines(tmp_path)
    assert len(lines(tmp_path)) == 8 + 1 + 1 + 5 + 1  # nothing was rewritten


def test_three_attempts_leave_each_step_once(build, tmp_path):
    for begin, end in ((0, 4), (2, 6), (4, 10)):
        processor = build()
        if begin:
            processor.resume_at(begin)
        for step in range(begin + 1, end + 1):
            processor.log_step(record(step))
        processor.close()
    assert steps(tmp_path) == list(range(1, 11))


def test_a_job_started_anew_in_its_folder_supersedes_the_earlier_one(build, tmp_path):
    for loss in (1.0, 2.0):
        processor = build()
        for step in (1, 2, 3):
            processor.log_step(record(step, loss=loss))
        processor.close()
    effective = read_metrics(tmp_path / "metrics.jsonl", kind="train")
    assert [line["loss"] for line in effective] == [2.0] * 3


@pytest.mark.parametrize("keep", [1, 40, -1])
def test_a_half_written_last_line_costs_that_line_only(build, tmp_path, keep):
    first = build()
    for step in (1, 2, 3):
        first.log_step(record(step))
    first.close()
    path = tmp_path / "metrics.jsonl"
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last.rstrip(b"\n")[:keep])
    assert steps(tmp_path) == [1, 2]
    second = build()
    second.resume_at(2)
    second.log_step(record(3))
    second.log_step(record(4))
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_damage_inside_an_attempt_is_refused_with_its_line(build, tmp_path):
    processor = build()
    for step in (1, 2, 3):
        processor.log_step(record(step))
    path = tmp_path / "metrics.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:30] + b"\n" + third)
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path, kind="train")


def test_a_step_twice_in_an_attempt_is_refused(build, tmp_path):
    processor = build()
    processor.log_step(record(1))
    processor.log_step(record(1))
    with pytest.raises(ValueError, match="step 1 twice"):
        read_metrics(tmp_path / "metrics.jsonl", kind="train")


def test_a_full_disk_is_an_error(tmp_path):
    file = MetricsFile(tmp_path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), file._descriptor)
    with pytest.raises(OSError, match=r"space"):
        file.append({"kind": "train", "step": 1})


# ---- console, mirrors -------------------------------------------------------------------------


def test_log_steps_are_the_first_every_log_freq_and_the_last(build, config):
    config.training.steps = 12
    processor = build()
    assert [step for step in range(1, 13) if processor.should_log(step)] == [1, 5, 10, 12]


def test_console_has_one_line_per_log_step_with_the_time_left(build, clock, caplog):
    processor = build()
    with caplog.at_level(logging.INFO):
        for step in range(1, 11):
            clock(60)
            processor.log_step(record(step))
    shown = [entry.getMessage() for entry in caplog.records if "step: " in entry.getMessage()]
    assert len(shown) == 3
    for part in (
        "loss:  2.50000",
        "grad_norm:  1.2500",
        "lr: 1.000e-03",
        "valid tokens/s: 0",
        "GiB",
    ):
        assert part in shown[1]
    assert "eta: unknown" in shown[0]
    assert "eta: 0:05:00" in shown[1]  # five steps of a minute are left
    assert "eta: 0:00:00" in shown[2]


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_has_the_stock_names_and_loses_superseded_steps(build, tmp_path, config):
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


def test_stock_log_calls_say_what_to_call_instead(build):
    processor = build()
    with pytest.raises(NotImplementedError, match="log_step"):
        processor.log(1, 2.0, 2.0, 1.0)
    with pytest.raises(NotImplementedError, match="log_validation_record"):
        processor.log_validation(loss=1.0, step=1)


def test_closing_twice_is_harmless(build):
    processor = build()
    processor.close()
    processor.close()


# ---- wandb ------------------------------------------------------------------------------------


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


def test_an_offline_wandb_run_writes_its_history(build, wandb_environment, config, tmp_path):
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


# ---- memory on the CPU ------------------------------------------------------------------------


def test_cpu_peak_memory_grows_with_a_tensor_and_falls_after_a_reset():
    monitor = CpuMemoryMonitor()
    before = monitor.get_peak_stats().max_reserved_gib
    block = torch.ones(64, 1024, 1024)  # 256 MiB
    grown = monitor.get_peak_stats().max_reserved_gib
    assert 0.2 < grown - before < 0.4
    del block
    try:
        (monitor._proc / "clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not reset the peak")
    assert monitor.get_peak_stats().max_reserved_gib < grown - 0.15


def test_cpu_monitor_without_proc_reports_the_peak_of_the_process(tmp_path):
    monitor = CpuMemoryMonitor(proc=tmp_path)
    stats = monitor.get_peak_stats()
    assert stats.max_active_gib == stats.max_reserved_gib > 0.05
    assert 0 < stats.max_reserved_pct < 100
    assert monitor.device_name.startswith("CPU")


@pytest.mark.gpu
def test_cuda_peak_memory_is_that_of_the_allocator_since_the_reset():
    from titan_lowprec.titan.memory_monitor import build_memory_monitor

    monitor = build_memory_monitor("cuda")
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert monitor.get_peak_stats().max_active_gib >= 1.0
    del block
    torch.cuda.empty_cache()
    monitor.reset_peak_stats()
    assert monitor.get_peak_stats().max_reserved_gib < 0.5
    assert monitor.device_name == torch.cuda.get_device_name()
