import json
from dataclasses import make_dataclass

import pytest

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
    small, name, degree, processes, part, changed, problems
):
    config = changed(small, {f"parallelism.{name}": degree})
    (problem,) = problems(config, world_size=processes)
    assert problem.key in (f"parallelism.{name}", "parallelism.*_degree")
    assert part in str(problem)


@pytest.mark.parametrize(
    ("vocabulary", "processes", "refused"),
    [(2049, 2, False), (2049, 4, True), (2050, 4, True), (2052, 4, False)],
)
def test_tensor_parallel_and_fsdp_divide_the_vocabulary_evenly(
    small, monkeypatch, vocabulary, processes, refused, changed, problems
):
    from torchtitan.protocols.train_spec import get_train_spec

    flavors = get_train_spec("llama3_lowprec").model_args
    monkeypatch.setitem(flavors, "x", flavor(vocab_size=vocabulary))
    settings = {"model.flavor": "x", "parallelism.tensor_parallel_degree": 2}
    found = [*problems(changed(small, settings), world_size=processes)]
    assert [str(problem.key) for problem in found] == refused * [
        "parallelism.tensor_parallel_degree"
    ]


def test_the_chunked_head_takes_tensor_parallelism_and_no_pipeline(small, changed, problems):
    settings = {"parallelism.tensor_parallel_degree": 2, "loss.impl": "linear_chunked"}
    assert problems(changed(small, settings), world_size=2) == []
    settings = {"parallelism.pipeline_parallel_degree": 2, "loss.impl": "linear_chunked"}
    found = [*problems(changed(small, settings), world_size=2)]
    assert [problem.key for problem in found] == [
        "parallelism.pipeline_parallel_degree",
        "loss.impl",
    ]


def test_tensor_parallelism_needs_a_divisible_row(small, changed, problems):
    settings = {
        "parallelism.tensor_parallel_degree": 2,
        "training.seq_len": 255,
        "validation.seq_len": 255,
    }
    (problem,) = problems(changed(small, settings), world_size=2)
    assert "divide training.seq_len=255" in str(problem)


def test_the_global_batch_counts_ranks_with_different_rows_only(small, changed, problems):
    config = changed(small, {"training.global_batch_size": 16})
    assert problems(config, world_size=2) == []
    (problem,) = problems(config, world_size=4)
    assert "x 4 data-parallel ranks" in str(problem)
    split = changed(config, {"parallelism.tensor_parallel_degree": 2})
    assert problems(split, world_size=4) == []


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"recipe": "nvfp4_full"}, "recipe must be"),
        ({"recipe": "nvfp4_mixed", "gradient_groups": "tile"}, "gradient_groups must be"),
        ({"dq_accum": "fp16_boost"}, "dq_accum must be"),
        ({"delta_gradient": "unquantised_fault"}, "delta_gradient must be"),
        ({"tile_q": 32}, "tile_q and tile_k must be"),
    ],
)
def test_triton_is_refused_where_only_a_reference_exists(small, settings, part, changed, problems):
    settings = {f"attention.{name}": value for name, value in settings.items()}
    config = changed(small, {**settings, "attention.impl": "triton", "model.flavor": "8B"})
    (problem,) = problems(config, device_type="cuda")
    assert problem.key == "attention.impl"
    assert part in str(problem)
    assert problems(changed(config, {"attention.impl": "auto"}), device_type="cuda") == []


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_mixed"])
def test_triton_is_accepted_for_every_recipe_with_kernels(small, recipe, changed, problems):
    settings = {"attention.recipe": recipe, "attention.impl": "triton", "model.flavor": "8B"}
    assert problems(changed(small, settings), device_type="cuda") == []


def test_the_fault_of_d_is_refused_where_no_gradient_is_quantised(small, changed, problems):
    config = changed(small, {"attention.delta_gradient": "unquantised_fault"})
    assert problems(config) == []
    for recipe in ("fp32", "bf16"):
        (problem,) = problems(changed(config, {"attention.recipe": recipe}))
        assert problem.key == "attention.delta_gradient"
        assert f"attention.recipe={recipe}, which quantises no gradient" in str(problem)


def test_triton_is_accepted_for_what_the_kernels_do(small, changed, problems):
    config = changed(small, {"attention.impl": "triton", "model.flavor": "8B"})
    assert problems(config, device_type="cuda") == []


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
def test_head_dimensions(small, monkeypatch, head_dim, rotate, keys, changed, problems):
    from torchtitan.protocols.train_spec import get_train_spec

    monkeypatch.setitem(get_train_spec("llama3_lowprec").model_args, "x", flavor(head_dim=head_dim))
    config = changed(small, {"model.flavor": "x", "attention.rotate": rotate})
    assert [problem.key for problem in problems(config)] == keys


def test_a_head_dimension_that_cannot_rotate_is_fine_in_bf16(small, monkeypatch, changed, problems):
    from torchtitan.protocols.train_spec import get_train_spec

    monkeypatch.setitem(get_train_spec("llama3_lowprec").model_args, "x", flavor(head_dim=96))
    assert problems(changed(small, {"model.flavor": "x", "attention.recipe": "bf16"})) == []


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(
    small, tmp_path, changed, problems
):
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


def test_an_export_at_the_end_may_hold_the_model_only(small, changed, problems):
    settings = {"checkpoint.last_save_model_only": True, "checkpoint.last_save_in_hf": True}
    assert problems(changed(small, settings)) == []


def test_weights_need_checkpointing_to_be_enabled(small, tmp_path, changed, problems):
    settings = {"checkpoint.enable": False, "checkpoint.initial_load_path": str(tmp_path)}
    (problem,) = problems(changed(small, settings))
    assert problem.key == "checkpoint.enable"


def test_hugging_face_weights_in_a_folder_are_accepted(small, tmp_path, changed, problems):
    settings = {"checkpoint.initial_load_in_hf": True, "model.hf_assets_path": str(tmp_path)}
    assert len(problems(changed(small, settings))) == 1
    (tmp_path / "model.safetensors").touch()
    assert problems(changed(small, settings)) == []
    settings["checkpoint.initial_load_model_only"] = False
    (problem,) = problems(changed(small, settings))
    assert problem.key == "checkpoint.initial_load_model_only"


def test_wandb_must_be_installed(small, monkeypatch, changed, problems):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = problems(changed(small, {"metrics.enable_wandb": True}))
    assert problem.key == "metrics.enable_wandb"


def test_a_profile_on_a_gpu_is_longer_than_its_warm_up(small, changed, problems):
    settings = {"profiling.enable_profiling": True, "profiling.profile_freq": 3}
    (problem,) = problems(changed(small, settings), device_type="cuda")
    assert problem.key == "profiling.profile_freq"
    settings["profiling.profile_freq"] = 4
    assert problems(changed(small, settings), device_type="cuda") == []
