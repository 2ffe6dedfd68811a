"""The program end to end: the literal command, processes, resume, signals and refusals."""

import json
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.titan.conftest import ROOT, Run, command, environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unbroken(train):
    """Six steps in one go, with a checkpoint at the end."""
    run = train("unbroken", "--training.steps=6", "--checkpoint.interval=2")
    assert run.status == 0, run.output
    return run


def checkpoint_tensors(run, step, tmp_path):
    """Everything in a checkpoint, as a flat dictionary."""
    file = tmp_path / f"{run.folder.name}-{step}.pt"
    dcp_to_torch_save(run.folder / "checkpoint" / f"step-{step}", file)
    flat = {}

    def collect(prefix, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{prefix}/{key}", inner)
        else:
            flat[prefix] = value

    collect("", torch.load(file, weights_only=False))
    return flat


def assert_equal_states(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


def test_literal_command_equals_the_module_without_the_hook_in_every_bit(train, unbroken):
    literal = train(
        "literal", "--training.steps", "6", "--checkpoint.interval", "2", module="torchtitan.train"
    )
    assert literal.status == 0, literal.output
    for name in ("loss", "grad_norm", "lr", "fingerprint", "tokens_seen"):
        assert literal.column(name) == unbroken.column(name), name


def test_without_the_hook_stock_torchtitan_refuses_the_literal_command(train):
    run = train(
        "no-hook",
        "--training.steps=1",
        module="torchtitan.train",
        env={"TITAN_LOWPREC_AUTOLOAD": "0"},
    )
    assert run.status != 0
    assert "--job.config" in run.output


def test_loss_falls_and_every_step_is_recorded_once(unbroken):
    assert unbroken.column("step") == [1, 2, 3, 4, 5, 6]
    losses = unbroken.column("loss")
    assert 7.0 < losses[0] < 8.5  # ln(2048) = 7.6
    assert losses[-1] < losses[0]


def test_two_resumes_equal_the_unbroken_run_in_every_bit(train, unbroken, tmp_path):
    for steps in (2, 4, 6):
        broken = train("broken", f"--training.steps={steps}", "--checkpoint.interval=2")
        assert broken.status == 0, broken.output
    for name in ("step", "loss", "grad_norm", "lr", "fingerprint", "tokens_seen"):
        assert broken.column(name) == unbroken.column(name), name
    assert_equal_states(
        checkpoint_tensors(broken, 6, tmp_path), checkpoint_tensors(unbroken, 6, tmp_path)
    )


@pytest.mark.parametrize(
    "layout",
    ["parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"],
)
def test_two_processes_train_on_the_same_batches_as_one(train, unbroken, layout):
    run = train(
        layout,
        "--training.steps=6",
        "--training.local_batch_size=1",
        f"--{layout}=2",
        "--checkpoint.no-enable",
        processes=2,
    )
    assert run.status == 0, run.output
    assert run.column("fingerprint") == unbroken.column("fingerprint")
    torch.testing.assert_close(
        torch.tensor(run.column("loss")), torch.tensor(unbroken.column("loss")), rtol=2e-3, atol=0
    )


def test_accumulation_does_not_change_the_batch_or_the_loss(train, unbroken):
    run = train(
        "accumulated",
        "--training.steps=3",
        "--training.local_batch_size=1",
        "--training.global_batch_size=2",
        "--checkpoint.no-enable",
    )
    assert run.status == 0, run.output
    assert run.column("fingerprint") == unbroken.column("fingerprint")[:3]
    torch.testing.assert_close(
        torch.tensor(run.column("loss")),
        torch.tensor(unbroken.column("loss")[:3]),
        rtol=1e-3,
        atol=0,
    )


def test_checkpoint_of_two_processes_continues_on_one_with_the_next_batch(train, unbroken):
    common = ("--training.global_batch_size=2", "--checkpoint.interval=2")
    two = train(
        "shrink", "--training.steps=2", "--training.local_batch_size=1", *common, processes=2
    )
    assert two.status == 0, two.output
    one = train("shrink", "--training.steps=4", *common)
    assert one.status == 0, one.output
    assert one.column("fingerprint") == unbroken.column("fingerprint")[:4]


def test_changed_recipe_is_refused_with_its_keys_and_allowed_by_option(train):
    first = train("changed", "--training.steps=2")
    assert first.status == 0, first.output
    changes = ("--training.steps=3", "--attention.scales=token", "--data.seed=7")
    refused = train("changed", *changes)
    assert refused.status != 0
    assert "attention.scales: 'token_block' -> 'token'" in refused.output
    assert "data.seed: 0 -> 7" in refused.output
    assert "--checkpoint.allow_changed_config" in refused.output
    allowed = train(
        "changed",
        "--training.steps=3",
        "--attention.scales=token",
        "--checkpoint.allow_changed_config",
    )
    assert allowed.status == 0, allowed.output


def test_sigterm_saves_and_the_run_continues(train):
    name = "signalled"
    folder = train(name, "--training.steps=1", "--checkpoint.no-enable").folder
    process = subprocess.Popen(
        command(folder, "--training.steps=2000", "--checkpoint.interval=10000"),
        env=environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for_step(folder, 3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    stopped = Run(process.returncode, output, folder)
    assert stopped.status == 128 + signal.SIGTERM, output
    last = stopped.column("step")[-1]
    resumed = train(name, f"--training.steps={last + 2}")
    assert resumed.status == 0, resumed.output
    assert resumed.column("step") == list(range(1, last + 3))


def wait_for_step(folder, step, *, timeout_s=600):
    """Wait until a second attempt has recorded a step."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        if sum(record["kind"] == "train" for record in records) > step:
            return
        time.sleep(0.2)
    raise TimeoutError(f"no step {step} in {folder}")


def test_end_of_data_is_an_error_status_with_the_remedy(train, tmp_path):
    documents = tmp_path / "few.jsonl"
    documents.write_text(
        "".join(json.dumps({"text": "a few words " * 20}) + "\n" for _ in range(9))
    )
    run = train(
        "exhausted", "--training.steps=1000", f"--data.paths={documents}", "--data.no-repeat"
    )
    assert run.status != 0
    assert "data.repeat" in run.output
    steps = run.column("step")[-1]
    assert 0 < steps < 1000
    assert (run.folder / "checkpoint" / f"step-{steps}" / ".metadata").is_file()


def test_run_that_diverges_stops_and_keeps_the_last_good_checkpoint(train):
    run = train(
        "diverged",
        "--training.steps=50",
        "--optimizer.lr=1e38",
        "--lr_scheduler.warmup_steps=0",
        "--training.max_skipped_steps=3",
        "--checkpoint.interval=1",
        "--checkpoint.keep_latest_k=0",
    )
    assert run.status != 0
    assert "training.max_skipped_steps" in run.output
    records = run.metrics()
    assert records[-1]["skipped_steps"] == 3
    last_good = records[-1]["step"] - 3
    saved = sorted(path.name for path in (run.folder / "checkpoint").glob("step-*"))
    assert f"step-{last_good}" in saved and f"step-{last_good + 1}" not in saved
    assert dcp.FileSystemReader(run.folder / "checkpoint" / f"step-{last_good}").read_metadata()


def test_validation_is_equal_every_round_and_on_uneven_ranks(train, tmp_path):
    documents = tmp_path / "validation.jsonl"
    lines = [json.dumps({"text": f"document {i} " * (5 + i)}) for i in range(21)]
    documents.write_text("\n".join(lines))
    frozen = (
        f"--data.validation_paths={documents}",
        "--validation.steps=-1",
        "--training.steps=2",
        "--optimizer.lr=1e-30",
        "--validation.enable",
        "--validation.freq=1",
        "--checkpoint.no-enable",
    )
    one = train("validate-1", *frozen)
    two = train(
        "validate-2",
        *frozen,
        "--training.local_batch_size=1",
        "--validation.local_batch_size=7",
        processes=2,
    )
    assert one.status == 0, one.output
    assert two.status == 0, two.output
    (first, second) = one.metrics("validation")
    assert (first["loss"], first["tokens"]) == (second["loss"], second["tokens"])
    for record in two.metrics("validation"):
        assert record["tokens"] == first["tokens"]
        assert record["loss"] == pytest.approx(first["loss"], rel=1e-4)


def test_initial_weights_that_cannot_be_loaded_are_an_error(train, tmp_path):
    run = train(
        "no-weights", "--training.steps=1", f"--checkpoint.initial_load_path={tmp_path / 'missing'}"
    )
    assert run.status != 0
    assert "checkpoint.initial_load_path" in run.output


def test_unusable_checkpoint_folder_does_not_turn_into_random_weights(train, unbroken):
    folder = train("half", "--training.steps=1", "--checkpoint.no-enable").folder
    (folder / "checkpoint" / "step-1").mkdir(parents=True)
    run = train(
        "half",
        "--training.steps=1",
        f"--checkpoint.initial_load_path={unbroken.folder / 'checkpoint' / 'step-6'}",
    )
    assert run.status != 0
    assert "random weights" in run.output


def test_hugging_face_export_is_loaded_again_without_changing_a_bit(train):
    exported = (
        "--checkpoint.last_save_in_hf",
        "--checkpoint.last_save_model_only",
        "--optimizer.lr=1e-30",
        "--optimizer.weight_decay=0.0",
        "--training.steps=1",
    )
    first = train("hf-first", *exported, "--debug.seed=7")
    assert first.status == 0, first.output
    folder = first.folder / "checkpoint" / "step-1"
    second = train(
        "hf-second",
        *exported,
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={folder}",
    )
    assert second.status == 0, second.output
    left, right = (
        load_file(run.folder / "checkpoint" / "step-1" / "model-00001-of-00001.safetensors")
        for run in (first, second)
    )
    assert "model.layers.3.self_attn.q_proj.weight" in left
    assert_equal_states(left, right)
    assert first.column("loss") == second.column("loss")
