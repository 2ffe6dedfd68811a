"""What cannot be captured is refused at start, with its reason."""

import pytest

REFUSED = [
    ({}, "cpu", 1, "graph.enable", "need a CUDA device"),
    ({"parallelism.tensor_parallel_degree": 2}, "cuda", 2, "graph.enable", "not proven"),
    ({"training.enable_cpu_offload": True}, "cuda", 1, "training.enable_cpu_offload", "host"),
    ({"attention.recipe": "nvfp4_full"}, "cuda", 1, "graph.enable", "no kernel takes them"),
    ({"model.flavor": "tiny"}, "cuda", 1, "graph.enable", "no kernel takes them"),
    ({"attention.impl": "reference"}, "cuda", 1, "attention.impl", "on the host"),
    ({"graph.max_documents": 33}, "cuda", 1, "graph.max_documents", "data.max_documents=32"),
    ({"graph.max_documents": 8}, "cuda", 2, "graph.max_documents", "on every process or on none"),
    ({"graph.max_documents": -1}, "cuda", 1, "graph.max_documents", "at least 0"),
    (
        {"activation_checkpoint.mode": "full"},
        "cuda",
        1,
        "activation_checkpoint.preserve_rng_state",
        "during a capture",
    ),
    (
        {"activation_checkpoint.mode": "selective"},
        "cuda",
        1,
        "activation_checkpoint.preserve_rng_state",
        "during a capture",
    ),
    (
        {"quantize.linear.float8.enable_fsdp_float8_all_gather": True},
        "cuda",
        1,
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        "not proven",
    ),
]


@pytest.fixture
def graph(small, changed):
    """A configuration that can be captured on a GPU, with changes."""

    def graph(settings):
        plain = {
            "graph.enable": True,
            "activation_checkpoint.mode": "none",
            "model.flavor": "1B",  # tiny's heads of 32 have no kernels
        }
        return changed(small, {**plain, **settings})

    return graph


def test_a_plain_job_on_gpus_is_accepted(graph, problems):
    for processes in (1, 2):
        assert problems(graph({}), device_type="cuda", world_size=processes) == []


@pytest.mark.parametrize(("settings", "device", "processes", "key", "reason"), REFUSED)
def test_what_cannot_be_captured_is_refused_with_its_reason(
    graph, problems, settings, device, processes, key, reason
):
    found = problems(graph(settings), device_type=device, world_size=processes)
    (problem,) = [p for p in found if p.key == key]
    assert reason in str(problem)


def test_pipeline_parallelism_is_refused_for_the_graph_as_well(graph, problems):
    config = graph({"parallelism.pipeline_parallel_degree": 2})
    found = problems(config, device_type="cuda", world_size=2)
    assert any(p.key == "graph.enable" and "schedule" in str(p) for p in found)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused(graph, problems, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments:True")
    (problem,) = problems(graph({}), device_type="cuda")
    assert problem.key == "graph.enable" and name in str(problem)


def test_without_the_graph_nothing_of_this_is_asked(graph, problems):
    settings = {"graph.enable": False, "activation_checkpoint.mode": "full"}
    assert problems(graph(settings), device_type="cpu") == []


def test_checkpointing_without_the_random_state_is_accepted(graph, problems):
    settings = {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.preserve_rng_state": False,
    }
    assert problems(graph(settings), device_type="cuda") == []
