import copy
import math
from pathlib import Path

import pytest
from torchtitan.config import ConfigManager

from titan_lowprec.titan.check_config import check_config, launched_world_size

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_good_on_one_gpu(recipe, parse):
    check_config(parse(recipe=recipe), device_type="cuda", world_size=1)


def test_the_small_configuration_is_good_on_two_cpu_processes(small):
    check_config(small, device_type="cpu", world_size=2)


def test_a_start_without_a_launcher_says_how_to_start(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert launched_world_size() == 3
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match=r"WORLD_SIZE: .*is missing; start with `torchrun -m"):
        launched_world_size()


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
    ({"profiling.enable_profiling": True}, "enable_profiling", "accelerators only"),
    ({"profiling.enable_memory_snapshot": True}, "enable_memory_snapshot", "accelerators only"),
    ({"metrics.save_for_all_ranks": True}, "metrics.save_for_all_ranks", "rank 0"),
    ({"fault_tolerance.enable": True}, "fault_tolerance.enable", "TorchFT"),
]


@pytest.mark.parametrize(("settings", "key", "part"), ONE_WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_setting_is_the_one_problem_found(
    small, settings, key, part, changed, problems, message
):
    (problem,) = problems(changed(small, settings))
    assert key in problem.key
    text = message(changed(small, settings))
    assert str(problem) in text
    assert part in text


def test_all_problems_are_in_one_message(small, changed, message):
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


def test_a_rule_is_left_out_where_its_own_setting_is_wrong_already(small, changed, problems):
    settings = {"training.local_batch_size": 0, "training.global_batch_size": 3}
    (problem,) = problems(changed(small, settings))
    assert problem.key == "training.local_batch_size"


def test_a_section_that_is_no_section_is_one_problem(small, problems):
    config = copy.deepcopy(small)
    config.attention = 3
    (problem,) = problems(config)
    assert problem.key == "attention"
    assert "[attention]" in problem.remedy


def test_strings_that_come_from_a_file_are_found(tmp_path, problems, parse):
    text = (
        (Path(__file__).parents[1] / "small.toml")
        .read_text()
        .replace("steps = 200", 'steps = "200"')
        .replace("lr = 3e-3", 'lr = "a"')
    )
    (tmp_path / "recipe.toml").write_text(text)
    found = problems(parse(recipe=tmp_path / "recipe.toml"))
    assert {problem.key for problem in found} == {"training.steps", "optimizer.lr"}


def test_a_recipe_without_our_sections_says_what_to_set(message):
    text = message(ConfigManager().parse_args([]))
    assert "job.custom_config_module" in text
    assert "titan_lowprec.titan.register" in text
