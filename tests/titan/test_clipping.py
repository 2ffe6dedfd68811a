"""Clipping where the optimizer reads gradients is clipping, to a rounding; the norm is the same."""

import copy

import pytest
import torch
import torch.nn as nn

from titan_lowprec.titan.clipping import clip
from titan_lowprec.titan.outcome import step_if_finite


class Container:
    """Stands for TorchTitan's container of optimizers."""

    def __init__(self, model, *, fused=True):
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def stepped(start, where, scale, *, finite=True):
    """Norm and parameters after three steps with gradients of about ``scale``."""
    model = copy.deepcopy(start)
    container, norms = Container(model), []
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for p in model.parameters():
            p.grad = scale * torch.randn(p.shape, generator=generator)
        norm, divisor = clip([model], 1.0, where=where)
        norms.append(norm)
        step_if_finite(container, torch.tensor(finite), grad_scale=divisor)
    (optimizer,) = container.optimizers
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return torch.stack(norms), [*(p.detach() for p in model.parameters()), *moments]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_both_places_have_the_same_norm_and_step(scale):
    start = nn.Linear(33, 17)
    norms, here = stepped(start, "gradients", scale)
    same_norms, there = stepped(start, "optimizer", scale)
    assert torch.equal(norms, same_norms)
    clipped = bool((norms > 1).any())
    assert clipped == (scale > 1e-3)
    for a, b in zip(here, there, strict=True):
        if clipped:  # parameters are of the size of one step, moments of a clipped gradient
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9 if scale < 1 else 1e-7)
        else:
            assert torch.equal(a, b)


def test_the_norm_is_float64s_and_a_clipped_gradient_has_the_maximum():
    model = nn.Linear(64, 64)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    truth = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
    norm, divisor = clip([model], 0.5, where="optimizer")
    torch.testing.assert_close(norm.double(), truth, rtol=1e-6, atol=0)
    torch.testing.assert_close((norm / divisor).item(), 0.5, rtol=1e-6, atol=0)
    norm, divisor = clip([model], 0.5, where="gradients")
    assert divisor is None
    torch.testing.assert_close(clip([model], 0.5, where="gradients")[0].item(), 0.5)


def test_a_step_that_is_not_finite_changes_nothing_with_a_divisor_either():
    start = nn.Linear(33, 17)
    _, after = stepped(start, "optimizer", 1.0, finite=False)
    for a, b in zip(start.parameters(), after, strict=False):
        assert torch.equal(a, b)


def test_an_optimizer_that_would_not_divide_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="fused optimizers are required"):
        step_if_finite(
            Container(model, fused=False), torch.tensor(True), grad_scale=torch.tensor(2.0)
        )
