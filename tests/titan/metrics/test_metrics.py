import dataclasses
import json
import logging
import math

import pytest

from titan_lowprec.titan import flops, metrics
from titan_lowprec.titan.metrics_file import read_metrics


def test_every_step_is_a_line_with_every_figure_of_the_record(build, record, lines):
    processor = build()
    for step in range(1, 5):
        processor.log_step(record(step))
    written = lines()
    assert [line["step"] for line in written] == [1, 2, 3, 4]
    for name, value in dataclasses.asdict(record(1)).items():
        if name != "step":
            assert written[0][name] == value
    assert written[0]["kind"] == "train"
    assert written[0]["documents_per_row"] == 1.0
    assert written[0]["padding_fraction"] == 0.5
    assert written[0]["memory_gib"] > 0
    assert written[0]["time"] > 1.6e9


def test_a_line_is_on_disk_before_the_step_returns(build, record, lines):
    build().log_step(record(1))
    assert len(lines()) == 1  # the processor is still open


def test_throughput_counts_valid_tokens_over_the_step_alone(build, clock, record, lines):
    processor = build()
    clock(50)
    processor.begin_step()
    clock(2)
    processor.log_step(record(1))
    processor.begin_step()
    clock(4)
    processor.log_step(record(2))
    assert [line["step_time_s"] for line in lines()] == [2, 4]
    assert [line["valid_tokens_per_s"] for line in lines()] == [3.0, 1.5]


def test_the_time_of_a_validation_round_counts_for_no_training_step(build, clock, tmp_path, record):
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


def test_mfu_of_a_two_document_pack_by_hand(build, clock, record, lines):
    processor = build()
    processor.peak = flops.Peak("test chip", 1e5)
    clock(2)
    processor.log_step(record(1))
    (line,) = lines()
    # two documents of 3 and 5 tokens: 8 tokens x 6 x 1,000 weights + 12 x 21 x 2 x 16 x 2 layers
    useful = 48_000 + 16_128
    assert line["mfu"] == pytest.approx(useful / 2 / (2 * 1e5), rel=1e-12)
    assert line["peak_name"] == "test chip"
    assert line["tflops_per_device"] == pytest.approx(useful / 2 / 2 / 1e12, rel=1e-12)


def test_mfu_of_an_unknown_device_is_null_with_one_warning(build, caplog, record, lines):
    with caplog.at_level(logging.INFO):
        processor = build()
        for step in range(1, 6):
            processor.log_step(record(step))
    assert {line["mfu"] for line in lines()} == {None}
    assert {line["peak_name"] for line in lines()} == {None}
    warnings = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "MFU is not reported" in warnings[0].getMessage()


def test_non_finite_figures_are_valid_json_and_read_back_as_they_were(build, tmp_path, record):
    build().log_step(record(1, loss=math.nan, grad_norm=math.inf))
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (line,) = read_metrics(tmp_path / "metrics.jsonl", kind="train")
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == math.inf
    assert "non_finite" not in line


@pytest.mark.parametrize("fingerprint", ["ff", "00000000000000FF", "-0000000000000ff", 255])
def test_a_fingerprint_that_is_no_16_hexadecimal_digits_is_refused(fingerprint, record):
    with pytest.raises((ValueError, TypeError), match=r"fingerprint|string"):
        record(1, fingerprint=fingerprint)


def test_a_record_cannot_be_changed(record):
    with pytest.raises(dataclasses.FrozenInstanceError):
        record(1).loss = 0.0


def test_other_ranks_write_nothing(build, tmp_path, monkeypatch, config, record):
    config.metrics.enable_tensorboard = True
    monkeypatch.setattr(metrics, "rank", lambda: 1)
    processor = build()
    processor.resume_at(0)
    processor.log_step(record(1))
    processor.log_validation_record(1, 1.0, 1)
    assert list(tmp_path.iterdir()) == []


def test_log_steps_are_the_first_every_log_freq_and_the_last(build, config):
    config.training.steps = 12
    processor = build()
    assert [step for step in range(1, 13) if processor.should_log(step)] == [1, 5, 10, 12]


def test_console_has_one_line_per_log_step_with_the_time_left(build, clock, caplog, record):
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
