"""Health metrics: keys, when they are measured, and that the training keeps its bits."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.titan.health import HealthProbe, larger
from titan_lowprec.titan.llama3.args import FLAVORS
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.specs import AttentionPlan

CU = torch.tensor([[0, 30, 64, 64], [0, 64, 64, 64]], dtype=torch.int32)


def small_model(recipe):
    plan = AttentionPlan(spec=getattr(AttentionSpec, recipe)(mask="causal").encode())
    args = dataclasses.replace(FLAVORS["tiny"], n_layers=2, vocab_size=64, attention=plan)
    torch.manual_seed(0)
    model = LowprecLlama(args)
    with torch.no_grad():
        model.init_weights()
    return model


def train_once(model, probe, step):
    """Loss and gradients of one microbatch."""
    model.zero_grad()
    tokens = torch.arange(128).view(2, 64) % 64
    with probe.watching(step):
        loss = model(tokens, cu_seqlens=CU).float().logsumexp(-1).mean()
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def probe_of(model, every):
    return HealthProbe(SimpleNamespace(model_parts=[model]), every=every)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_measured_step_has_the_bits_of_one_that_is_not(recipe):
    model = small_model(recipe)
    quiet, loud = probe_of(model, 0), probe_of(model, 1)
    loss, gradients = train_once(model, quiet, 1)
    state = torch.get_rng_state()
    measured, others = train_once(model, loud, 1)
    assert torch.equal(loss, measured) and torch.equal(state, torch.get_rng_state())
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name
    assert quiet.take(1) == {} and loud.take(1)
    assert all(not layer._forward_pre_hooks for layer in model.layers.values())


def test_keys_name_metric_layer_and_operand_and_the_largest_of_them():
    model = small_model("mxfp8")
    probe = probe_of(model, 2)
    for step in (1, 2, 3):
        train_once(model, probe, step)
    assert probe.take(1) == {} and probe.take(3) == {}
    figures = probe.take(2)
    errors = [figures[f"quantisation/output_error/layer{i}"] for i in range(2)]
    assert figures["quantisation/output_error/largest"] == max(errors) > 1e-3
    flushed = [figures[f"quantisation/flushed/layer{i}.{x}"] for i in range(2) for x in "qkv"]
    assert figures["quantisation/flushed/largest"] == max(flushed)
    sums = [figures[f"quantisation/ds_row_sum/layer{i}"] for i in range(2)]
    assert figures["quantisation/ds_row_sum/largest"] == max(sums) > 0
    assert figures["causality/rows_outside_block/largest"] == 0.0
    assert "quantisation/exponent_median/largest" not in figures
    assert probe.take(2) == {}


def test_the_first_microbatch_of_a_step_is_the_one_that_is_measured():
    model = small_model("bf16")
    probe = probe_of(model, 1)
    train_once(model, probe, 1)
    first = dict(probe._figures[1])
    train_once(model, probe, 1)
    assert probe._figures == {1: first}


def test_nan_is_the_largest():
    assert larger(2.0, 1.0) == 2.0 and larger(1.0, 2.0) == 2.0
    assert larger(float("nan"), 1.0) != larger(float("nan"), 1.0)
    assert larger(1.0, float("nan")) != larger(1.0, float("nan"))
