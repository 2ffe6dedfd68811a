"""Any runs side by side, and the events of a run."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import tomli_w

from titan_lowprec.experiments.anomalies import anomalies
from titan_lowprec.experiments.comparison import (
    anomaly_lines,
    comparison_notes,
    comparison_rows,
    read_runs,
    run_names,
)
from titan_lowprec.experiments.report_table import setting_rows
from titan_lowprec.experiments.resolution import NOT_IDENTITY
from titan_lowprec.titan.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def record(step, loss, *, attempt=1, skipped=0):
    return {
        "kind": "train",
        "step": step,
        "loss": loss,
        "grad_norm": 1.0,
        "valid_tokens": 100,
        "valid_tokens_seen": 100 * step,
        "valid_tokens_per_s": 50.0,
        "step_time_s": 0.5,
        "fingerprint": f"{step:016x}",
        "skipped_steps": skipped,
        "attempt": attempt,
    }


def noisy(steps, **changes):
    """Losses 5.00, 5.01, 5.02, 5.00, ..."""
    return [record(step, 5 + 0.01 * (step % 3), **changes) for step in range(1, steps + 1)]


def write_run(folder, records, *, recipe="bf16", steps=30):
    (folder / "run").mkdir(parents=True)
    config = {
        "job": {"dump_folder": str(folder)},
        "attention": {"recipe": recipe},
        "training": {"steps": steps},
        "debug": {"seed": len(recipe)},
    }
    (folder / "run" / "config.toml").write_text(tomli_w.dumps(config))
    (folder / "run" / "versions.json").write_text(json.dumps({"commit": "abcdef0123456789"}))
    text = "".join(
        json.dumps({**item, "loss": item["loss"] if math.isfinite(item["loss"]) else None}) + "\n"
        for item in records
    )
    (folder / "metrics.jsonl").write_text(text.replace("NaN", "null"))
    return folder


def test_a_jump_above_the_noise_is_a_spike_and_the_noise_is_none():
    train = noisy(30)
    assert anomalies(train) == ()
    train[20] = record(21, 5.3)
    (event,) = anomalies(train)
    assert (event.kind, event.step, event.tokens) == ("spike", 21, 2100)
    assert event.text == "loss 5.300, 0.290 above the median of 20 steps"


def test_a_jump_within_eight_deviations_or_in_the_first_steps_is_no_spike():
    loud = [record(step, 5 + 0.5 * (step % 3)) for step in range(1, 31)]
    loud[20] = record(21, 7.0)
    assert anomalies(loud) == ()
    early = noisy(30)
    early[5] = record(6, 9.0)
    assert anomalies(early) == ()


def test_restarts_and_skipped_steps_are_events():
    train = [*noisy(12), *(record(step, 5.0, attempt=2) for step in range(13, 16))]
    train[13] = {**record(14, math.nan, attempt=2, skipped=1), "grad_norm": math.inf}
    train[14] = record(15, 5.0, attempt=2, skipped=1)
    events = [(event.kind, event.step, event.text) for event in anomalies(train)]
    assert events == [
        ("restart", 13, "attempt 2 continues"),
        ("skipped", 14, "not finite: loss nan, gradient norm inf"),
    ]


@pytest.fixture
def folders(tmp_path):
    worse = [{**item, "loss": item["loss"] + 0.25} for item in noisy(20)]
    worse[15]["loss"] = 9.0
    return [
        write_run(tmp_path / "base", noisy(30)),
        write_run(tmp_path / "other", worse, recipe="mxfp8"),
    ]


def test_runs_of_unequal_length_are_compared_at_the_tokens_both_reached(folders):
    results = read_runs(folders, read_metrics)
    assert results.tokens == 2000
    first, second = comparison_rows(results)
    assert first[:3] == ("base", "30/30", "3,000") and first[10] == "abcdef012345"
    assert second[:5] == ("other", "20/30", "2,000", "5.2650", "+0.2500")
    assert second[6:10] == ("0.500 s", "1", "0", "0")
    end, spike = anomaly_lines(results)
    assert end == "other, step 20: ends before step 30"
    assert spike.startswith("other, step 16: spike, loss 9.000")


def resumed(folder):
    """Killed after step 14, gone on from the checkpoint of step 10; three steps are skipped."""
    write_run(folder, noisy(14))
    lines = [{"kind": "resume", "step": 10, "attempt": 2}]
    for step in range(11, 31):
        bad = step in (20, 21, 25)
        skipped = sum(step >= first for first in (20, 21, 25))
        line = record(step, 4.0, attempt=2, skipped=skipped)
        lines.append({**line, "non_finite": {"grad_norm": "nan"}} if bad else line)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_resume_and_skipped_steps_are_said_with_their_steps(folders, tmp_path):
    results = read_runs([folders[0], resumed(tmp_path / "resumed")], read_metrics)
    assert anomaly_lines(results) == [
        "resumed, step 11: restart, attempt 2 continues",
        "resumed, steps 20 to 21: skipped, first not finite: loss 4, gradient norm nan",
        "resumed, step 25: skipped, not finite: loss 4, gradient norm nan",
    ]
    row = comparison_rows(results)[1]
    assert row[1] == "30/30" and row[3:5] == ("4.0000", "-1.0100") and row[7:10] == ("0", "3", "1")


def never_started(folder):
    """What a sweep leaves of a run that crashed before its first record."""
    folder.mkdir()
    config = {"job": {"dump_folder": "x"}, "training": {"steps": 30}, "attention": {"recipe": "a"}}
    (folder / "recipe.toml").write_text(tomli_w.dumps(config))
    state = {"status": "failed", "hash": "0", "reason": "ValueError: no documents"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize("order", [1, -1])
def test_run_without_records_is_a_row_and_an_event_wherever_it_stands(folders, tmp_path, order):
    empty = never_started(tmp_path / "empty")
    results = read_runs([folders[0], empty][::order], read_metrics)
    rows = {row[0]: row for row in comparison_rows(results)}
    assert results.tokens == 3000 and rows["base"][1] == "30/30"
    assert set(rows["empty"][1:7]) == {"–"}  # noqa: RUF001
    (event,) = anomaly_lines(results)
    assert event == "empty, no step: ends before step 30, failed: ValueError: no documents"
    assert not any("Saw the batches" in line for line in comparison_notes(results))


def test_only_runs_without_records_and_folders_of_no_run_are_refused(folders, tmp_path):
    with pytest.raises(ValueError, match=r"a run must have records, got none in empty"):
        read_runs([never_started(tmp_path / "empty")], read_metrics)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match=r"bare/run/config.toml: must exist.*dump folder of a run"):
        read_runs([folders[0], tmp_path / "bare"], read_metrics)


def test_validation_says_its_step_since_runs_end_at_unequal_ones(folders):
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "validation", "step": 30, "loss": 4.5, "tokens": 7}\n')
    rows = comparison_rows(read_runs(folders, read_metrics))
    assert [row[5] for row in rows] == ["4.5000 (step 30)", "–"]  # noqa: RUF001


def test_many_settings_are_rows_and_few_are_columns(folders, tmp_path):
    results = read_runs(folders, read_metrics)
    assert setting_rows(results, hidden=NOT_IDENTITY)[0] == (
        "arm",
        "attention.recipe",
        "debug.seed",
    )
    third = write_run(tmp_path / "third", noisy(30), recipe="nvfp4_mixed", steps=31)
    header, rows = setting_rows(read_runs([folders[0], third], read_metrics), hidden=NOT_IDENTITY)
    assert header == ("setting", "base", "third")
    assert ("training.steps", "30", "31") in rows and len(rows) == 3


def test_names_of_a_sweeps_runs_have_their_arm(tmp_path):
    folders = [tmp_path / "bf16" / "seed0-0123abcd", tmp_path / "mxfp8" / "seed1-4567cdef"]
    assert run_names(folders) == ["bf16/seed0-0123abcd", "mxfp8/seed1-4567cdef"]


def test_names_are_the_shortest_ends_that_differ(tmp_path):
    assert run_names([tmp_path / "a" / "seed0", tmp_path / "b" / "seed0"]) == ["a/seed0", "b/seed0"]
    with pytest.raises(ValueError, match=r"must differ"):
        run_names([tmp_path / "a", tmp_path / "a"])


@pytest.mark.slow
def test_tool_writes_events_and_settings_that_differ_and_refuses_what_is_no_run(
    folders, tmp_path, monkeypatch, capsys
):
    spec = importlib.util.spec_from_file_location("report", ROOT / "tools" / "report.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    words = ["report", *map(str, folders), "--to", str(tmp_path / "x")]
    monkeypatch.setattr(sys, "argv", words)
    assert tool.main() == 0 and "| other | 20/30 |" in capsys.readouterr().out
    html, text = (tmp_path / "x.html").read_text(), (tmp_path / "x.md").read_text()
    assert "step 16: spike" in html and "step 16: spike" in text
    assert "| arm | attention.recipe | debug.seed |" in text
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert "<script" not in html and "https://" not in html
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "nothing")])
    assert tool.main() == 2 and "name the dump folder of a run" in capsys.readouterr().err
