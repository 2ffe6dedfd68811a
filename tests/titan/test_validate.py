import copy
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import titan_lowprec.ops.attention.kernel as attention_kernel
from titan_lowprec.titan import estimate, validate
from titan_lowprec.titan.validate import load_recipe, validate_recipes

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
SMALL = str(Path(__file__).with_name("small.toml"))


@functools.cache
def parsed():
    return load_recipe(SMALL, [])


def small(**settings):
    """The small configuration with settings changed, ``section__key=value``."""
    config = copy.deepcopy(parsed())
    for name, value in settings.items():
        section, key = name.split("__")
        assert hasattr(getattr(config, section), key)
        setattr(getattr(config, section), key, value)
    return config


def rows(world_size=1, **settings):
    return dict(validate.describe(small(**settings), world_size=world_size))


# ---- the command ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_finds_every_recipe_good_and_touches_no_device():
    program = (
        "import sys, torch, titan_lowprec.validate as v;"
        "status = v.main(sys.argv[1:]);"
        "assert not torch.cuda.is_initialized();"
        "assert not torch.distributed.is_initialized();"
        "sys.exit(status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, RECIPES)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for recipe in RECIPES:
        assert f"{recipe}: ok" in result.stdout
    assert f"{len(RECIPES)} of {len(RECIPES)} recipes are good" in result.stdout


def test_one_bad_recipe_does_not_hide_the_others(tmp_path, capsys):
    wrong = {
        "syntax": "[job",
        "key": SMALL_TEXT + "\n[loss]\nimpll = 1\n",
        "value": SMALL_TEXT.replace("max_documents = 32", "max_documents = 0"),
        "module": SMALL_TEXT.replace(
            "titan_lowprec.titan.register", "titan_lowprec.titan.regester"
        ),
    }
    paths = []
    for name, text in wrong.items():
        paths.append(tmp_path / f"{name}.toml")
        paths[-1].write_text(text)
    status = validate_recipes([*map(str, paths), str(tmp_path / "absent.toml"), SMALL])
    out = capsys.readouterr().out
    assert status == 1
    assert out.count(": ERROR") == 5
    assert "impll" in out
    assert "data.max_documents: must be at least 1, got 0" in out
    assert "regester" in out
    assert "must be a file" in out
    assert f"{SMALL}: ok" in out
    assert "1 of 6 recipes are good" in out


SMALL_TEXT = Path(SMALL).read_text()


def test_every_unknown_key_is_named_with_the_one_that_was_meant(tmp_path, capsys):
    text = SMALL_TEXT.replace("max_documents = 32", "max_documnets = 32")
    text += "\n[los]\nz_loss = 0.0\n[quantize.linear.float8]\nrecipe_nam = 'rowwise'\n[fast]\n"
    (tmp_path / "wrong.toml").write_text(text)
    assert validate_recipes([str(tmp_path / "wrong.toml")]) == 1
    out = capsys.readouterr().out
    named = [line.strip() for line in out.splitlines() if "must be a key" in line]
    assert [line.split(":")[0] for line in named] == [
        "data.max_documnets",
        "los",
        "quantize.linear.float8.recipe_nam",
        "fast",
    ]
    for line, meant in zip(
        named, ("data.max_documents?", "loss?", "float8.recipe_name?"), strict=False
    ):
        assert line.endswith(meant)
    assert "there are [" in named[3] and "'attention'" in named[3]


def test_overrides_are_checked_too(capsys):
    assert validate_recipes([SMALL, "--training.global_batch_size=20"]) == 1
    assert "use 16 or 24" in capsys.readouterr().out
    assert validate_recipes([SMALL, "--no.such.key=1"]) == 1
    assert "command line does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args", [[], ["--training.steps=3"], [SMALL, "--world-size", "x"], [SMALL, "--world-size=0"]]
)
def test_a_wrong_command_line_has_status_2_and_the_usage(args, capsys):
    assert validate_recipes(args) == 2
    assert "usage:" in capsys.readouterr().out


def test_a_command_line_is_split_into_recipes_world_size_and_overrides():
    args = ["a.toml", "b.toml", "--training.steps", "3", "--world-size", "8", "--x.y=1"]
    assert validate.parse_command(args) == (
        ["a.toml", "b.toml"],
        8,
        ["--training.steps", "3", "--x.y=1"],
    )


# ---- the table --------------------------------------------------------------------------------


def test_parameters_are_those_of_a_llama_by_hand():
    # dim 128, 4 layers, 4 heads and 2 KV heads of 32, FFN 384, vocabulary 2,048
    E, F, V, L = 128, 384, 2048, 4
    layer = 2 * E * E + 2 * E * 64 + 3 * E * F + 2 * E
    total = 2 * V * E + L * layer + E
    assert rows()["parameters"] == f"{total:,} ({total - V * E:,} without the embedding)"


def test_tokens_count_all_ranks_and_accumulation():
    assert rows(world_size=4)["tokens per step"] == "8,192 (32 rows of 256)"
    split = rows(parallelism__tensor_parallel_degree=2, world_size=4)
    assert split["tokens per step"] == "4,096 (16 rows of 256)"
    accumulated = rows(training__global_batch_size=64)
    assert accumulated["tokens per step"] == "16,384 (64 rows of 256)"
    assert accumulated["tokens in total"] == "3,276,800 (200 steps)"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "peak 0.003; 20 steps of warm-up, 0 at the peak, 180 of linear decay to 0 of it"),
        (
            {"lr_scheduler__decay_ratio": 0.2, "lr_scheduler__min_lr_factor": 0.1},
            "peak 0.003; 20 steps of warm-up, 140 at the peak, 40 of linear decay to 0.1 of it",
        ),
        (
            {"training__steps": 10},
            "peak 0.003; 10 steps of warm-up, 0 at the peak, 0 of linear decay to 0 of it; "
            "lr_scheduler.warmup_steps=20 is cut to 10 steps",
        ),
    ],
)
def test_the_schedule_is_the_one_that_torchtitan_runs(settings, text):
    assert rows(**settings)["learning rate"] == text


@pytest.mark.parametrize("settings", [{}, {"lr_scheduler__decay_ratio": 0.2}])
def test_the_schedule_agrees_with_torchtitans_learning_rates(settings):
    from torchtitan.components.lr_scheduler import build_lr_schedulers

    config = small(**settings)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=1.0)
    schedulers = build_lr_schedulers([optimizer], config.lr_scheduler, config.training.steps)
    rates = []
    for _ in range(config.training.steps):
        rates.append(schedulers.schedulers[0].get_last_lr()[0])
        optimizer.step()
        schedulers.step()
    words = rows(**settings)["learning rate"].split()
    warmup, stable, decay = int(words[2]), int(words[6]), int(words[10])
    assert warmup + stable + decay == len(rates)
    assert rates[warmup - 1] == 1.0
    # the first rate after the plateau, which TorchTitan makes one step longer
    assert rates[warmup + stable] == 1.0
    assert rates[warmup + stable + 1] < 1.0


def test_data_says_what_files_are_there(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 500_000)
    text = rows(data__paths=[f"{tmp_path}/*.txt", "bundled:train"])["data"]
    assert f"{tmp_path}/*.txt (2 files, 1.0 MB)" in text
    assert "bundled:train (1 file, " in text


def test_a_hub_dataset_is_not_looked_up():
    settings = {"data__source": "hf", "data__hf_name": "org/name", "data__hf_config": "small"}
    expected = "Hugging Face org/name small train: on the hub, not looked up"
    assert rows(**settings)["data"] == expected


def test_validation_is_described_or_off():
    assert rows()["validation"].startswith("every 50 steps, all batches of bundled:validation (1")
    assert rows(validation__enable=False)["validation"] == "off"


def test_attention_is_resolved_for_a_cpu_and_for_a_hopper_gpu(monkeypatch):
    seen = []

    def unsupported_reason(spec, *, head_dim, device):
        seen.append((spec.recipe, head_dim, device.type, torch.cuda.get_device_capability(device)))
        return None

    monkeypatch.setattr(attention_kernel, "unsupported_reason", unsupported_reason, raising=False)
    described = rows(attention__high_precision_layers=["0", "3"])
    assert described["attention"] == "mxfp8, bf16 in layers 0, 3; head dimension 32"
    assert (described["  on CPU"], described["  on sm90"]) == ("reference", "triton")
    assert seen == [("mxfp8", 32, "cuda", (9, 0))]


def test_a_named_implementation_that_a_cpu_lacks_is_shown_as_refused_there():
    described = rows(attention__impl="triton", model__flavor="8B")
    assert described["  on CPU"].startswith("refused: ")
    assert described["  on sm90"] == "triton"


# ---- the estimate -----------------------------------------------------------------------------


def small_estimate(world_size=1, **settings):
    return estimate.memory_estimate(small(**settings), world_size=world_size)


def test_states_are_sharded_over_ranks_but_not_over_replicas():
    one, four = small_estimate(), small_estimate(world_size=4)
    assert one.parameters == 4 * 1_311_872
    assert one.parameters + one.gradients + one.optimizer == 16 * 1_311_872
    assert four.parameters == one.parameters // 4
    assert four.optimizer == one.optimizer // 4
    assert four.activations == one.activations
    replicas = small_estimate(parallelism__data_parallel_replicate_degree=2, world_size=4)
    assert replicas.parameters == one.parameters // 2


def test_activations_of_a_layer_by_hand():
    # 2,048 tokens; a layer keeps 4 E + 4 F + H D in bf16 and one byte of Q, K and V codes
    E, F, HD, JD, L, tokens = 128, 384, 128, 64, 4, 8 * 256
    layer = 2 * (4 * E + 4 * F + HD) + (HD + 2 * JD)
    none = small_estimate(activation_checkpoint__mode="none").activations
    assert none == tokens * (L * layer + 2 * E)
    full = small_estimate(activation_checkpoint__mode="full").activations
    assert full == tokens * (L * 2 * E + layer + 2 * E)
    bf16 = small_estimate(activation_checkpoint__mode="none", attention__recipe="bf16")
    assert bf16.activations - none == tokens * L * (HD + 2 * JD)


def test_checkpointing_modes_are_ordered():
    def of(mode, option="2"):
        return small_estimate(
            activation_checkpoint__mode=mode, activation_checkpoint__selective_ac_option=option
        ).activations

    assert of("full") < of("selective", "op") < of("selective", "4") < of("none") * 1.25
    assert of("selective", "1") == of("full")


def test_a_chunked_loss_holds_chunks_and_a_gradient_of_the_head():
    chunked = small_estimate(loss__impl="linear_chunked", loss__chunk_rows=128).logits
    assert chunked == 128 * 2048 * 12 + 4 * 2048 * 128
    settings = {"loss__impl": "linear_chunked", "loss__chunk_rows": 128}
    spread = small_estimate(2, parallelism__tensor_parallel_degree=2, **settings).logits
    assert spread == chunked // 2
    assert small_estimate().logits == 2048 * 2048 * 12
    assert small_estimate(loss__impl="logits_bf16").logits == 2048 * 2048 * 6


def test_the_total_is_the_sum_of_the_parts_in_the_table():
    memory = small_estimate()
    parts = memory.parameters + memory.gradients + memory.optimizer
    assert memory.total == parts + memory.gathered + memory.activations + memory.logits
    assert f"about {memory.total / 2**30:.2f} GiB, 1 process" in rows()["memory per GPU"]
