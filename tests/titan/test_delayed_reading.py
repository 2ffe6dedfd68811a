"""Reading a step one later loses no line of metrics, no checkpoint and no reason to stop."""

import json

import pytest

pytestmark = pytest.mark.slow
DELAYED = "tests.titan.delayed"
SAVED = ("--training.steps=6", "--checkpoint.interval=3", "--validation.enable")
VALIDATED = ("--validation.freq=2", "--validation.steps=1", "--validation.local_batch_size=2")


def test_records_and_validations_equal_those_of_a_run_that_reads_at_once(train):
    at_once = train("at-once", *SAVED, *VALIDATED)
    later = train("later", *SAVED, *VALIDATED, module=DELAYED)
    assert at_once.status == 0, at_once.output
    assert later.status == 0, later.output
    for name in ("step", "loss", "grad_norm", "lr", "fingerprint", "tokens_seen"):
        assert later.column(name) == at_once.column(name), name
    assert later.column("step") == [1, 2, 3, 4, 5, 6]
    losses = [record["loss"] for record in at_once.metrics("validation")]
    assert [record["loss"] for record in later.metrics("validation")] == losses
    kinds = [json.loads(text) for text in (later.folder / "metrics.jsonl").open()]
    order = [(line["step"], line["kind"]) for line in kinds if line["kind"] != "resume"]
    assert order == sorted(order)  # a step's line stands before the validation after it


def test_data_that_end_leave_every_finished_step_recorded_and_saved(train, tmp_path):
    documents = tmp_path / "few.jsonl"
    texts = [json.dumps({"text": "a few words " * 20}) + "\n" for _ in range(9)]
    documents.write_text("".join(texts))
    options = ("--training.steps=1000", f"--data.paths={documents}", "--data.no-repeat")
    run = train("ended", *options, module=DELAYED)
    assert run.status != 0 and "data.repeat" in run.output
    steps = run.column("step")
    assert steps == list(range(1, len(steps) + 1))
    assert (run.folder / "checkpoint" / f"step-{steps[-1]}" / ".metadata").is_file()


def test_a_run_that_diverges_stops_with_every_step_recorded(train):
    run = train(
        "diverges",
        "--training.steps=50",
        "--optimizer.lr=1e38",
        "--lr_scheduler.warmup_steps=0",
        "--training.max_skipped_steps=3",
        "--checkpoint.interval=2",
        "--checkpoint.keep_latest_k=0",
        module=DELAYED,
    )
    assert run.status != 0 and "training.max_skipped_steps" in run.output
    records = run.metrics()
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert records[-1]["skipped_steps"] in (3, 4)  # the step queued while the third was read
    last_good = max(r["step"] for r in records if r["skipped_steps"] == 0)
    saved = [int(p.name.removeprefix("step-")) for p in (run.folder / "checkpoint").glob("step-*")]
    assert all(step <= last_good for step in saved)
