"""The literal command trains a draft; its checkpoint continues elsewhere, decodes and exports."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_lowprec.models.dflash.hub import args_from_hub, export_draft
from titan_lowprec.titan.dflash.evaluate import evaluate_recipe, latest_step, load_draft
from titan_lowprec.titan.dflash.rows import Answers
from titan_lowprec.titan.dflash.store import StoreOptions, store_rows

pytestmark = pytest.mark.slow
SMALL = Path(__file__).with_name("small.toml")


@pytest.fixture(scope="module")
def trained(train):
    rounds = ("--validation.enable", "--validation.freq=2", "--validation.steps=2")
    sizes = ("--validation.local_batch_size=3",)
    run = train("draft", *rounds, *sizes, recipe=SMALL, module="torchtitan.train")
    assert run.status == 0, run.output
    return run


def test_every_step_has_the_figures_of_drafts(trained):
    assert trained.column("step") == [1, 2, 3, 4]
    for record in trained.metrics():
        assert record["anchors"] == 8
        assert 0 < record["loss_denominator"] < record["draft_labels"] <= 24
        assert 1 <= record["acceptance_strict"] <= record["acceptance_pass_through"] <= 4
        assert len(record["slot_accuracy"]) == 3
    # an untrained draft guesses: the entropy of 2,048 tokens, within the logits' spread
    assert 7 < trained.column("loss")[0] < 9


def test_validation_measures_loss_and_acceptance_with_fixed_anchors(trained):
    first, second = trained.metrics("validation")
    assert (first["step"], second["step"]) == (2, 4)
    # 2 batches of 3 rows with 4 anchors of at most 3 labels
    assert first["tokens"] == second["tokens"] <= 72
    assert second["loss"] < first["loss"] < 9, "the same blocks, after more training"
    assert 1 <= second["acceptance_strict"] <= 4 and len(second["slot_accuracy"]) == 3


def test_checkpoint_holds_the_draft_alone(trained):
    folder = trained.folder / "checkpoint" / "step-4"
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    model = {n for n in names if n.startswith(("fc.", "norm.", "hidden_norm.", "layers."))}
    assert "layers.1.self_attn.q_norm.weight" in model
    assert not [n for n in names if "embed" in n or "output" in n or "wq" in n]


def test_two_processes_with_a_sharded_target_continue_where_one_stopped(train, trained):
    folder = trained.folder.with_name("continued")
    for part in ("checkpoint/step-2", "checkpoint/identity.json"):
        source, target = trained.folder / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    changes = ("--training.local_batch_size=1", "--dflash.shard_target")
    run = train("continued", *changes, recipe=SMALL, processes=2)
    assert run.status == 0, run.output
    assert run.column("step") == [3, 4]
    for name in ("fingerprint", "anchors", "draft_labels"):
        assert run.column(name) == trained.column(name)[2:], name
    expected = pytest.approx(trained.column("loss_denominator")[2:], rel=1e-6)
    assert run.column("loss_denominator") == expected
    assert run.column("loss") == pytest.approx(trained.column("loss")[2:], rel=1e-4)
    assert run.column("grad_norm") == pytest.approx(trained.column("grad_norm")[2:], rel=1e-3)


def test_decoding_from_the_checkpoint_and_from_the_export_is_greedy(
    parse, resolve, trained, tmp_path
):
    config = parse(f"--job.dump_folder={trained.folder}", "--data.cache_dir=" + str(tmp_path))
    assert latest_step(config).name == "step-4"
    model = load_draft(resolve(config), latest_step(config), device=torch.device("cpu"))
    export_draft(model, tmp_path / "hub", dtype=torch.float32, max_positions=64)
    assert args_from_hub(tmp_path / "hub", anchor_slots=4, gamma=3.0) == model.args
    options = {"dtype": torch.float32, "prompts": 2, "prompt_tokens": 8, "max_new_tokens": 10}
    results = [evaluate_recipe(config, draft=d, **options) for d in (None, tmp_path / "hub")]
    assert results[0] == results[1]
    figures = results[0].as_json()
    assert figures["divergences"] == []
    assert figures["new_tokens"] == figures["target_calls_plain"] == 20
    added = sum(int(n) * count for n, count in figures["distribution"].items())
    # the first token of each prompt is the target's own; the last verification may overshoot
    assert 18 <= added <= 18 + 2 * 3
    assert figures["target_calls"] == 2 + sum(figures["distribution"].values())
    assert "equal to plain greedy decoding" in results[0].report()


def test_answers_are_stored_and_an_interrupted_run_continues(parse, tmp_path, make_target):
    def store(name, rows):
        config = parse("--data.cache_dir=" + str(tmp_path), "--training.seq_len=40")
        options = StoreOptions(
            folder=tmp_path / name,
            rows=rows,
            answers=Answers(prompt_tokens=6, answer_tokens=10),
            tokens_only=False,
            shard_batches=1,
        )
        return store_rows(config, options)

    whole = store("whole", 6)
    store("parts", 2)
    assert store("parts", 6) == whole
    for shard in whole.shards:
        files = [(tmp_path / name / shard.file).read_bytes() for name in ("whole", "parts")]
        assert files[0] == files[1]
    assert whole.longest <= 32 and whole.max_documents == 2
    assert whole.identity.tap_layers == (1, 2)
