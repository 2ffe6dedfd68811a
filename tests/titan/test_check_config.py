import copy
import json
import math
import operator
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from titan_lowprec import _autoload

_autoload.assume_cpu_without_accelerator()

from torchtitan.config import ConfigManager  # noqa: E402

import titan_lowprec.titan.register  # noqa: E402, F401
from titan_lowprec.titan.check_config import ConfigError, check_config, find_problems  # noqa: E402

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SMALL = Path(__file__).with_name("small.toml")


def parse(*args, recipe=SMALL):
    return ConfigManager().parse_args([f"--job.config_file={recipe}", *args])


@pytest.fixture(scope="module")
def small():
    return parse()


def changed(config, settings):
    config = copy.deepcopy(config)
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        assert hasattr(operator.attrgetter(section)(config), name), f"no setting {key}"
        setattr(operator.attrgetter(section)(config), name, value)
    return config


def problems(config, *, device_type="cpu", world_size=1):
    return [*find_problems(config, device_type=device_type, world_size=world_size)]


def message(config, **options):
    options = {"device_type": "cpu", "world_size": 1} | options
    with pytest.raises(ConfigError) as caught:
        check_config(config, **options)
    return str(caught.value)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_good_on_one_gpu(recipe):
    check_config(parse(recipe=recipe), device_type="cuda", world_size=1)


def test_the_small_configuration_is_good_on_two_cpu_processes(small):
    check_config(small, device_type="cpu", world_size=2)


# One setting or combination a line: settings, key, a part of the requirement or remedy.
ONE_WRONG = [
    # types
    ({"training.steps": "12"}, "training.steps", "without quotes"),
    ({"optimizer.lr": "3e-4"}, "optimizer.lr", "without quotes"),
    ({"training.seq_len": 256.0}, "training.seq_len", "an integer"),
    ({"training.local_batch_size": True}, "training.local_batch_size", "an integer"),
    ({"attention.rotate": 1}, "attention.rotate", "true or false"),
    ({"attention.recipe": "fp8"}, "attention.recipe", "'nvfp4_mixed'"),
    ({"compile.components": "model"}, "compile.components", '["model"]'),
    ({"attention.high_precision_layers": [0]}, "attention.high_precision_layers", "text in quotes"),
    ({"checkpoint.initial_load_path": 3}, "checkpoint.initial_load_path", "quotes"),
    ({"lr_scheduler.total_steps": "5"}, "lr_scheduler.total_steps", "an integer"),
    ({"training.dataloader.num_workers": "2"}, "training.dataloader.num_workers", "integer"),
    ({"model.converters": [""]}, "model.converters", "empty string"),
    ({"data.paths": ["bundled:train", ""]}, "data.paths", "empty string"),
    ({"attention.high_precision_layers": [""]}, "attention.high_precision_layers", "write []"),
    # ranges
    ({"attention.tile_q": 48}, "attention.tile_q", "use 64 or 32"),
    ({"attention.tile_k": 0}, "attention.tile_k", "use 32 or more"),
    ({"attention.weight_exponent": 9}, "attention.weight_exponent", "use 8 or less"),
    ({"attention.max_lag": -1}, "attention.max_lag", "use 0 or more"),
    ({"loss.chunk_rows": 1000}, "loss.chunk_rows", "use 1024 or 896"),
    ({"loss.z_loss": -1e-4}, "loss.z_loss", "use 0 or more"),
    ({"loss.softcap": math.inf}, "loss.softcap", "finite"),
    ({"data.max_documents": 0}, "data.max_documents", "use 1 or more"),
    ({"data.min_document_tokens": 0}, "data.min_document_tokens", "use 1 or more"),
    ({"data.seed": -1}, "data.seed", "use 0 or more"),
    ({"training.max_skipped_steps": 0}, "training.max_skipped_steps", "use 1 or more"),
    ({"training.max_norm": 0.0}, "training.max_norm", "raise it"),
    ({"training.global_batch_size": 0}, "training.global_batch_size", "or -1"),
    ({"optimizer.lr": math.nan}, "optimizer.lr", "finite"),
    ({"optimizer.beta2": 1.0}, "optimizer.beta2", "lower it"),
    ({"lr_scheduler.min_lr_factor": 2.0}, "lr_scheduler.min_lr_factor", "use 1 or less"),
    ({"metrics.log_freq": 0}, "metrics.log_freq", "use 1 or more"),
    ({"validation.steps": 0}, "validation.steps", "or -1"),
    ({"parallelism.data_parallel_shard_degree": 0}, "data_parallel_shard_degree", "or -1"),
    # attention
    (
        {"attention.weight_exponent": 8, "attention.max_lag": 2},
        "attention.weight_exponent and attention.max_lag",
        "log2(448)",
    ),
    ({"attention.dv_exponent": "fixed"}, "attention.fold", "use fold='block_scaled'"),
    ({"attention.fold": "block_scaled"}, "attention.fold", "gradient_groups='tile'"),
    ({"attention.impl": "triton"}, "attention.impl", "auto or reference"),
    ({"attention.high_precision_layers": ["4"]}, "attention.high_precision_layers", "0 to 3"),
    ({"attention.high_precision_layers": ["-1"]}, "attention.high_precision_layers", "0 to 3"),
    ({"attention.high_precision_layers": ["1", "1"]}, "attention.high_precision_layers", "once"),
    # model
    ({"model.name": "llama4_lowprec"}, "model.name", "llama3_lowprec"),
    ({"model.flavor": "7B"}, "model.flavor", "8B"),
    ({"model.tie_embeddings": True}, "model.tie_embeddings", "FSDP2"),
    ({"model.converters": ["float9"]}, "model.converters", "quantize.linear.float8"),
    ({"model.tokenizer_path": "tok"}, "model.tokenizer_path", "data.tokenizer"),
    # loss
    (
        {"loss.impl": "logits_bf16", "loss.z_loss": 1e-4},
        "loss.z_loss",
        "set it to 0 or loss.impl to logits_fp32",
    ),
    ({"loss.impl": "logits_bf16", "loss.softcap": 30.0}, "loss.softcap", "logits_bf16"),
    # batches and schedule
    ({"training.global_batch_size": 20}, "training.global_batch_size", "use 16 or 24"),
    ({"training.global_batch_size": 3}, "training.global_batch_size", "use 8"),
    ({"lr_scheduler.total_steps": 100}, "lr_scheduler.total_steps", "training.steps=200"),
    # data
    ({"training.dataset": "c4"}, "training.dataset", "data.paths"),
    ({"training.dataset_path": "/data"}, "training.dataset_path", "data.paths"),
    ({"validation.dataset": "c4"}, "validation.dataset", "data.validation_paths"),
    ({"validation.dataset_path": "/data"}, "validation.dataset_path", "data.validation_paths"),
    ({"validation.seq_len": 2048}, "validation.seq_len", "set validation.seq_len = 256"),
    ({"data.paths": []}, "data.paths", "bundled:train"),
    ({"data.paths": ["no/such/*.jsonl"]}, "data.paths", "no/such/*.jsonl"),
    ({"data.paths": ["bundled:test"]}, "data.paths", "bundled:validation"),
    ({"data.validation_paths": ["no/such.txt"]}, "data.validation_paths", "no/such.txt"),
    ({"data.source": "hf"}, "data.hf_name", "HuggingFaceFW"),
    ({"data.tokenizer": "no/such/folder"}, "data.tokenizer", "tokenizer.json"),
    ({"data.tokenizer": "bundled:other"}, "data.tokenizer", "bundled:tokenizer"),
    # checkpoints
    ({"checkpoint.last_save_model_only": True}, "checkpoint.last_save_model_only", "continued"),
    ({"checkpoint.last_save_in_hf": True}, "checkpoint.last_save_model_only", "set it to true"),
    ({"checkpoint.keep_latest_k": 1}, "checkpoint.keep_latest_k", "2 or more"),
    ({"checkpoint.initial_load_path": "no/such"}, "checkpoint.initial_load_path", "correct"),
    ({"checkpoint.initial_load_in_hf": True}, "model.hf_assets_path", "*.safetensors"),
    # the rest
    ({"activation_checkpoint.selective_ac_option": "ops"}, "selective_ac_option", 'use "op"'),
    ({"activation_checkpoint.selective_ac_option": "0"}, "selective_ac_option", 'use "op"'),
    ({"activation_checkpoint.mode": "memory_budget"}, "activation_checkpoint.mode", "compile"),
    ({"optimizer.name": "Muon"}, "optimizer.name", "AdamW"),
    ({"optimizer.early_step_in_backward": True}, "early_step_in_backward", "non-finite"),
    ({"profiling.enable_profiling": True, "profiling.profile_freq": 3}, "profile_freq", "use 4"),
    ({"metrics.save_for_all_ranks": True}, "metrics.save_for_all_ranks", "rank 0"),
    ({"fault_tolerance.enable": True}, "fault_tolerance.enable", "TorchFT"),
]


@pytest.mark.parametrize(("settings", "key", "part"), ONE_WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_setting_is_the_one_problem_found(small, settings, key, part):
    (problem,) = problems(changed(small, settings))
    assert key in problem.key
    text = message(changed(small, settings))
    assert str(problem) in text
    assert part in text


PARALLEL_WRONG = [
    ("pipeline_parallel_degree", 2, 2, "later pipeline stages"),
    ("context_parallel_degree", 2, 2, "keys of other ranks"),
    ("expert_parallel_degree", 2, 2, "no experts"),
    ("tensor_parallel_degree", 4, 4, "divide n_kv_heads=2"),
    ("data_parallel_shard_degree", 4, 2, "start 4 processes"),
    ("tensor_parallel_degree", 2, 3, "divide the number of processes, 3"),
]


@pytest.mark.parametrize(("name", "degree", "processes", "part"), PARALLEL_WRONG)
def test_a_degree_that_does_not_work_is_refused_with_its_reason(
    small, name, degree, processes, part
):
    config = changed(small, {f"parallelism.{name}": degree})
    (problem,) = problems(config, world_size=processes)
    assert problem.key in (f"parallelism.{name}", "parallelism.*_degree")
    assert part in str(problem)


def test_tensor_parallelism_needs_logits(small):
    settings = {"parallelism.tensor_parallel_degree": 2, "loss.impl": "linear_chunked"}
    (problem,) = problems(changed(small, settings), world_size=2)
    assert problem.key == "loss.impl"
    assert "parallelism.tensor_parallel_degree=2" in str(problem)


def test_tensor_parallelism_needs_a_divisible_row(small):
    settings = {
        "parallelism.tensor_parallel_degree": 2,
        "training.seq_len": 255,
        "validation.seq_len": 255,
    }
    (problem,) = problems(changed(small, settings), world_size=2)
    assert "divide training.seq_len=255" in str(problem)


def test_the_global_batch_counts_ranks_with_different_rows_only(small):
    config = changed(small, {"training.global_batch_size": 16})
    assert problems(config, world_size=2) == []
    (problem,) = problems(config, world_size=4)
    assert "x 4 data-parallel ranks" in str(problem)
    split = changed(config, {"parallelism.tensor_parallel_degree": 2})
    assert problems(split, world_size=4) == []


@pytest.mark.parametrize(
    ("settings", "part"),
    [({"recipe": "nvfp4_full"}, "nvfp4_full"), ({"dq_accum": "fp16_boost"}, "fp16_boost")],
)
def test_triton_is_refused_where_only_a_reference_exists(small, settings, part):
    settings = {f"attention.{name}": value for name, value in settings.items()}
    config = changed(small, {**settings, "attention.impl": "triton"})
    (problem,) = problems(config, device_type="cuda")
    assert problem.key == "attention.impl"
    assert part in str(problem)


def flavor(**changes):
    fixed = {"n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "vocab_size": 2048}
    args = fixed | changes
    return make_dataclass("Args", [(name, int) for name in args])(**args)


@pytest.mark.parametrize(
    ("head_dim", "rotate", "keys"),
    [
        (96, True, ["attention.rotate"]),
        (96, False, []),
        (40, True, ["model.flavor", "attention.rotate"]),
        (72, False, ["model.flavor"]),
        (16, True, []),
    ],
)
def test_head_dimensions(small, monkeypatch, head_dim, rotate, keys):
    from torchtitan.protocols.train_spec import get_train_spec

    monkeypatch.setitem(get_train_spec("llama3_lowprec").model_args, "x", flavor(head_dim=head_dim))
    config = changed(small, {"model.flavor": "x", "attention.rotate": rotate})
    assert [problem.key for problem in problems(config)] == keys


def test_a_head_dimension_that_cannot_rotate_is_fine_in_bf16(small, monkeypatch):
    from torchtitan.protocols.train_spec import get_train_spec

    monkeypatch.setitem(get_train_spec("llama3_lowprec").model_args, "x", flavor(head_dim=96))
    assert problems(changed(small, {"model.flavor": "x", "attention.recipe": "bf16"})) == []


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(small, tmp_path):
    content = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 2048, "content": "<eos>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (problem,) = problems(changed(small, {"data.tokenizer": str(tmp_path)}))
    assert problem.key == "data.tokenizer"
    assert "vocab_size=2048" in str(problem)
    assert "has 2049" in str(problem)
    content["added_tokens"][0]["id"] = 2047
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert problems(changed(small, {"data.tokenizer": str(tmp_path)})) == []


def test_an_export_at_the_end_may_hold_the_model_only(small):
    settings = {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}
    assert problems(changed(small, settings)) == []


def test_weights_need_checkpointing_to_be_enabled(small, tmp_path):
    settings = {"checkpoint.enable": False, "checkpoint.initial_load_path": str(tmp_path)}
    (problem,) = problems(changed(small, settings))
    assert problem.key == "checkpoint.enable"


def test_hugging_face_weights_in_a_folder_are_accepted(small, tmp_path):
    settings = {"checkpoint.initial_load_in_hf": True, "model.hf_assets_path": str(tmp_path)}
    assert len(problems(changed(small, settings))) == 1
    (tmp_path / "model.safetensors").touch()
    assert problems(changed(small, settings)) == []
    settings["checkpoint.initial_load_model_only"] = False
    (problem,) = problems(changed(small, settings))
    assert problem.key == "checkpoint.initial_load_model_only"


def test_wandb_must_be_installed(small, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = problems(changed(small, {"metrics.enable_wandb": True}))
    assert problem.key == "metrics.enable_wandb"


def test_all_problems_are_in_one_message(small):
    settings = {
        "training.steps": "12",
        "attention.tile_q": 33,
        "checkpoint.keep_latest_k": 1,
        "data.paths": ["no/such/file"],
        "parallelism.context_parallel_degree": 2,
    }
    text = message(changed(small, settings), world_size=2)
    assert "5 problems" in text
    for key, value in settings.items():
        assert f"{key}: must " in text
        assert repr(value if key != "data.paths" else "no/such/file") in text


def test_a_rule_is_left_out_where_its_own_setting_is_wrong_already(small):
    settings = {"training.local_batch_size": 0, "training.global_batch_size": 3}
    (problem,) = problems(changed(small, settings))
    assert problem.key == "training.local_batch_size"


def test_a_section_that_is_no_section_is_one_problem(small):
    config = copy.deepcopy(small)
    config.attention = 3
    (problem,) = problems(config)
    assert problem.key == "attention"
    assert "[attention]" in problem.remedy


def test_strings_that_come_from_a_file_are_found(tmp_path):
    text = (
        SMALL.read_text().replace("steps = 200", 'steps = "200"').replace("lr = 3e-3", 'lr = "a"')
    )
    (tmp_path / "recipe.toml").write_text(text)
    found = problems(parse(recipe=tmp_path / "recipe.toml"))
    assert {problem.key for problem in found} == {"training.steps", "optimizer.lr"}


def test_a_recipe_without_our_sections_says_what_to_set():
    text = message(ConfigManager().parse_args([]))
    assert "job.custom_config_module" in text
    assert "titan_lowprec.titan.register" in text
