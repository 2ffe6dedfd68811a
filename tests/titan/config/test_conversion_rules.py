"""FP8 and MXFP8 linear layers are refused where the hardware has no such products."""

import pytest
import torch

from titan_lowprec.titan import conversion_rules

ROWWISE = {
    "model.converters": ["quantize.linear.float8"],
    "quantize.linear.float8.recipe_name": "rowwise",
    "quantize.linear.float8.filter_fqns": ["output"],
}
MX = {"model.converters": ["quantize.linear.mx"]}


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(capability)`` pretends that such a GPU is here."""

    def gpu(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return gpu


@pytest.mark.parametrize(
    ("capability", "recipe", "refused"),
    [
        ((9, 0), "rowwise", False),
        ((10, 0), "rowwise_with_gw_hp", False),
        ((8, 9), "rowwise", True),
        ((8, 9), "tensorwise", False),
        ((8, 0), "tensorwise", True),
        ((8, 0), None, True),
    ],
)
def test_fp8_linears_need_the_capability_of_their_recipe(
    small, changed, problems, gpu, capability, recipe, refused
):
    gpu(capability)
    config = changed(small, {**ROWWISE, "quantize.linear.float8.recipe_name": recipe})
    found = [p for p in problems(config, device_type="cuda") if p.key == "model.converters"]
    assert bool(found) is refused
    if refused:
        assert str(capability) in str(found[0])


def test_fp8_linears_on_a_cpu_are_for_tests_only(small, changed, problems):
    (problem,) = problems(changed(small, ROWWISE))
    assert "no FP8 products" in str(problem)
    emulated = {
        "model.converters": ["quantize.linear.float8"],
        "quantize.linear.float8.emulate": True,
    }
    assert problems(changed(small, emulated)) == []


GATHERS = "quantize.linear.float8.enable_fsdp_float8_all_gather"
PRECOMPUTES = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"


@pytest.mark.parametrize(
    ("recipe", "settings", "processes", "refused"),
    [
        ("tensorwise", {}, 1, None),
        (None, {}, 1, None),
        (None, {GATHERS: True}, 2, None),
        (None, {GATHERS: True, PRECOMPUTES: True}, 2, None),
        (None, {GATHERS: True}, 1, GATHERS),
        ("tensorwise", {GATHERS: True}, 2, GATHERS),
        ("rowwise", {GATHERS: True}, 2, GATHERS),
        (None, {PRECOMPUTES: True}, 2, PRECOMPUTES),
    ],
)
def test_fp8_gathers_are_refused_where_torchtitan_drops_them(
    small, changed, problems, recipe, settings, processes, refused
):
    settings = {**ROWWISE, "quantize.linear.float8.recipe_name": recipe, **settings}
    found = problems(changed(small, settings), device_type="cuda", world_size=processes)
    assert [p.key for p in found] == ([refused] if refused else [])


def test_the_chunked_head_is_left_out(small, changed, problems):
    settings = {**ROWWISE, "loss.impl": "linear_chunked"}
    assert problems(changed(small, settings), device_type="cuda") == []
    settings["quantize.linear.float8.filter_fqns"] = ["attention.wk"]
    (problem,) = problems(changed(small, settings), device_type="cuda")
    assert problem.key == "quantize.linear.float8.filter_fqns" and "output" in str(problem)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_mxfp8_linears_are_refused_off_blackwell(small, changed, problems, gpu, capability):
    gpu(capability)
    (problem,) = problems(changed(small, MX), device_type="cuda")
    assert "Blackwell" in str(problem) and str(capability) in str(problem)
    (problem,) = problems(changed(small, MX), device_type="cpu")
    assert "Blackwell" in str(problem)


def test_mxfp8_linears_on_blackwell_need_a_torchao_that_has_them(
    small, changed, problems, gpu, monkeypatch
):
    gpu((10, 0))
    monkeypatch.setattr(conversion_rules, "has_mx_config", lambda: True)
    assert problems(changed(small, MX), device_type="cuda") == []
    monkeypatch.setattr(conversion_rules, "has_mx_config", lambda: False)
    (problem,) = problems(changed(small, MX), device_type="cuda")
    assert "up to 0.16" in str(problem)
