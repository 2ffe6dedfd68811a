import os

import pytest

from titan_lowprec.titan.metrics_file import MetricsFile, read_metrics


def steps(tmp_path, kind="train"):
    return [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl", kind=kind)]


def test_resume_supersedes_later_steps_of_earlier_attempts(build, tmp_path, record, lines):
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
    assert {"kind": "resume", "step": 5, "attempt": 2} in lines()
    assert len(lines()) == 8 + 1 + 1 + 5 + 1  # nothing was rewritten


def test_three_attempts_leave_each_step_once(build, tmp_path, record):
    for begin, end in ((0, 4), (2, 6), (4, 10)):
        processor = build()
        if begin:
            processor.resume_at(begin)
        for step in range(begin + 1, end + 1):
            processor.log_step(record(step))
        processor.close()
    assert steps(tmp_path) == list(range(1, 11))


def test_a_job_started_anew_in_its_folder_supersedes_the_earlier_one(build, tmp_path, record):
    for loss in (1.0, 2.0):
        processor = build()
        for step in (1, 2, 3):
            processor.log_step(record(step, loss=loss))
        processor.close()
    effective = read_metrics(tmp_path / "metrics.jsonl", kind="train")
    assert [line["loss"] for line in effective] == [2.0] * 3


@pytest.mark.parametrize("keep", [1, 40, -1])
def test_a_half_written_last_line_costs_that_line_only(build, tmp_path, keep, record):
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


def test_damage_inside_an_attempt_is_refused_with_its_line(build, tmp_path, record):
    processor = build()
    for step in (1, 2, 3):
        processor.log_step(record(step))
    path = tmp_path / "metrics.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:30] + b"\n" + third)
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path, kind="train")


def test_a_step_twice_in_an_attempt_is_refused(build, tmp_path, record):
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
