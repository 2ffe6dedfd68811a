"""Recipes of drafts that cannot work are refused with the key and a remedy; ours are good."""

import json
from pathlib import Path

import pytest
import torch

from titan_lowprec.models.dflash.feature_writer import FeatureWriter, finish_index
from titan_lowprec.models.dflash.features import FeatureIdentity, FeatureRecord
from titan_lowprec.titan.dflash.args import FLAVORS, draft_args
from titan_lowprec.titan.dflash.report import draft_rows
from titan_lowprec.titan.dflash.vocabulary import Vocabulary, read_vocabulary, vocabulary_of

BUNDLED = Path(__file__).parents[3] / "titan_lowprec" / "data" / "assets" / "tokenizer"

ONE_WRONG = [
    ("--dflash.gamma=0", "dflash.gamma", "be set, above 0"),
    ("--dflash.gamma=-1", "dflash.gamma", "at least 0"),
    ("--dflash.block_tokens=1", "dflash.block_tokens", "at least 2"),
    ("--dflash.anchor_slots=0", "dflash.anchor_slots", "at least 1"),
    ("--dflash.target_path=", "dflash.target_path", "folder with *.safetensors"),
    ("--dflash.mask_id=1", "dflash.mask_id", "ends sequences|eos"),
    ("--dflash.mask_id=2048", "dflash.mask_id", "in [0, 2048)"),
    ("--dflash.mask_id=-1", "dflash.mask_id", "no embedding row is unused"),
    ("--dflash.features=offline", "dflash.features_path", "name a folder"),
    ("--dflash.attention=flex_bf16", "dflash.attention", "no backward pass"),
    ("--loss.impl=logits_fp32", "loss.impl", "linear_chunked"),
    ("--loss.z_loss=0.1", "loss.z_loss", "be 0 for a draft"),
    ("--data.min_document_tokens=1", "data.min_document_tokens", "no candidate"),
    ("--model.flavor=kimi_k2", "dflash.features", "offline for kimi_k2"),
]


def test_the_small_recipe_is_good(parse, problems):
    assert problems(parse()) == []
    assert problems(parse("--model.flavor=tiny_qwen3"), world_size=2) == []


@pytest.mark.parametrize(("override", "key", "text"), ONE_WRONG, ids=[o for o, *_ in ONE_WRONG])
def test_one_wrong_setting_is_one_problem(parse, problems, override, key, text):
    found = problems(parse(override))
    matching = [p for p in found if p.startswith(f"{key}: ")]
    assert len(matching) == 1, found
    assert any(part in matching[0] for part in text.split("|")), matching


@pytest.mark.parametrize(
    ("taps", "text"), [([3], "last layer"), ([1, 1], "distinct"), ([1, 7], "taps must be in")]
)
def test_taps_outside_the_target_are_refused(parse, problems, taps, text):
    config = parse()
    config.dflash.taps = taps
    (problem,) = problems(config)
    assert problem.startswith("dflash.taps: must name layers 0 to 2") and text in problem


def capturable(parse, *overrides):
    """A draft whose steps a GPU can capture, with changes."""
    plain = ("--graph.enable", "--dflash.acceptance_freq=5", "--attention.recipe=bf16")
    return parse(*plain, "--model.flavor=qwen3_0p6b", "--dflash.mask_id=151669", *overrides)


def test_a_graph_of_a_draft_is_accepted_with_and_without_compile(parse, problems):
    assert problems(capturable(parse), device_type="cuda") == []
    assert problems(capturable(parse, "--compile.enable"), device_type="cuda", world_size=2) == []


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("--dflash.acceptance_freq=1", "dflash.acceptance_freq", "not replayed"),
        ("--dflash.shard_target", "dflash.shard_target", "not proven under capture"),
        ("--model.flavor=tiny", "graph.enable", "no kernel takes them"),
    ],
)
def test_what_a_graph_of_a_draft_cannot_hold_is_refused(parse, problems, override, key, text):
    found = problems(capturable(parse, override), device_type="cuda")
    assert any(p.startswith(f"{key}: ") and text in p for p in found), found


def test_spreading_that_drafts_lack_is_refused(parse, problems):
    found = problems(parse("--parallelism.tensor_parallel_degree=2"), world_size=2)
    assert any("spread over data-parallel ranks only" in problem for problem in found)


def stored(folder, **changes):
    options = {
        "target": "llama3 tiny 0",
        "tap_layers": (1, 2),
        "model_dim": 128,
        "vocab_size": 2048,
        "dtype": "float32",
        "tokenizer_sha256": read_vocabulary(BUNDLED).sha256,
        "tokenizer_entries": 2048,
        "eos_ids": (1,),
    }
    identity = FeatureIdentity(**(options | changes))
    writer = FeatureWriter(folder, identity, source="s", rank=0, per_shard=1)
    record = FeatureRecord(
        torch.arange(50),
        torch.ones(50, dtype=torch.bool),
        torch.zeros(50, dtype=torch.int32),
        torch.zeros(50, identity.feature_dim),
    )
    writer.add_batch([record])
    finish_index(folder, identity, ranks=1)
    return f"--dflash.features_path={folder}"


def test_stored_rows_of_another_target_or_tokenizer_are_refused(parse, problems, tmp_path):
    offline = ("--dflash.features=offline", "--training.seq_len=50")
    good = stored(tmp_path / "good")
    assert problems(parse(*offline, good)) == []
    (problem,) = problems(parse(good))
    assert problem.startswith("training.seq_len: must be at least 50")
    for changes, text in (
        ({"vocab_size": 4096}, "vocabulary and hidden size (2048, 128)"),
        ({"tokenizer_sha256": "ab"}, "data.tokenizer: must be the tokenizer"),
        ({"tap_layers": ()}, "hold features, and not tokens alone"),
    ):
        path = stored(tmp_path / str(changes), **changes)
        found = problems(parse(*offline, path))
        assert any(text in problem for problem in found), found


@pytest.mark.parametrize(
    ("flavor", "change", "text"),
    [
        ("tiny_qwen3", {}, None),
        ("tiny", {"rope_scaling": {"rope_type": "llama3"}, "rope_theta": 500000.0}, None),
        ("tiny", {"rope_theta": 500000.0}, "rope_type=llama3"),
        ("tiny_qwen3", {"rope_scaling": {"type": "yarn"}}, "rope_type=default"),
        ("tiny_qwen3", {"rope_theta": 10000.0}, "rope_theta=1e+06"),
        ("tiny_qwen3", {"hidden_size": 256}, "hidden_size=128"),
        ("tiny_qwen3", {"tie_word_embeddings": True}, "tie_word_embeddings=False"),
    ],
)
def test_hugging_face_target_of_other_sizes_is_refused(
    parse, problems, tmp_path, flavor, change, text
):
    config = {"vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 4} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    found = problems(parse(f"--model.flavor={flavor}", f"--dflash.target_path={tmp_path}"))
    assert [p for p in found if text in p] if text else not found, found


def test_paper_flavor_has_the_papers_taps_and_qwens_mask(parse):
    config = parse("--model.flavor=qwen3_8b", "--dflash.mask_id=-1")
    vocabulary = Vocabulary(entries=151669, mask_id=None, eos_ids=(151645,), sha256="")
    args = draft_args(FLAVORS["qwen3_8b"], config, vocabulary)
    assert args.tap_layers == (1, 9, 17, 25, 33)
    assert (args.layers, args.vocab_size, args.mask_id) == (5, 151936, 151669)
    kimi = FLAVORS["kimi_k2"].target
    assert (kimi.vocab_size, kimi.n_layers) == (163840, 61)
    assert vocabulary_of(config).entries == 2048


@pytest.mark.slow
def test_every_flavor_can_be_described(parse):
    for flavor in FLAVORS:
        config = parse(f"--model.flavor={flavor}")
        rows = dict(draft_rows(config, world_size=1, rows=2))
        assert flavor in rows["model"]
        assert "GiB" in rows["memory per GPU"]
    assert "random" in rows["target"]
