"""What `audit_reductions.py --draft` computes, against oracles that share no code with it."""

import importlib
import math
import sys
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

TOOLS = str(Path(__file__).resolve().parents[3] / "tools")


@pytest.fixture(scope="module")
def attention():
    sys.path.insert(0, TOOLS)
    yield importlib.import_module("audit_draft_attention")
    sys.path.remove(TOOLS)


@pytest.fixture(scope="module")
def claims(attention):
    return importlib.import_module("audit_claims")


def nearest_tf32(x):
    """The closest multiple of the spacing, ties to an even one, in exact fractions."""
    _, exponent = math.frexp(x)
    spacing = Fraction(2) ** (exponent - 11)
    return float(round(Fraction(x) / spacing) * spacing)  # Python rounds halves to even


def test_tf32_is_the_nearest_of_eleven_significant_bits(attention):
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -(2 + 2**-10), 0.75 + 2**-12])
    for value in torch.cat([x, ties]).tolist():
        assert float(attention.to_tf32(torch.tensor(value))) == nearest_tf32(value)


@pytest.mark.parametrize("visible", [1, 63, 200])
def test_exact_and_unrounded_tiles_agree_with_sdpa(attention, visible):
    x = attention.operands(queries=5, keys=200, visible=visible, scale=2.0, seed=visible)
    leaves = [t.double()[None].requires_grad_() for t in (x.q_TD, x.k_KD, x.v_KD)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=x.mask_TK)
    wanted = [out[0], *(t[0] for t in torch.autograd.grad(out, leaves, x.grad_TD.double()[None]))]
    for got, want in zip(attention.exact(x), wanted, strict=True):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-13)
    for order in (None, torch.tensor([2, 0, 3, 1])):
        found, _ = attention.tiled(x, attention.ARITHMETIC["fp32, IEEE products"], order)
        for got, want in zip(found, wanted, strict=True):
            assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


def test_one_tile_in_bf16_rounds_weights_and_nothing_else(attention):
    x = attention.operands(queries=7, keys=64, visible=50, scale=1.0, seed=0)
    (out, *_), rescales = attention.tiled(x, attention.ARITHMETIC["bf16, as FlexAttention"])
    q, k, v = (t.double().numpy() for t in (x.q_TD, x.k_KD, x.v_KD))
    score = (q @ k.T / np.sqrt(128))[:, :50]
    weight = np.exp(score - score.max(-1, keepdims=True)).astype(np.float32)
    rounded = weight.astype(ml_dtypes.bfloat16).astype(np.float64)
    wanted = rounded @ v[:50] / weight.astype(np.float64).sum(-1, keepdims=True)
    # a weight at a tie of fp32 may go either way: 2**-9 of one of 50
    assert np.abs(out.numpy() - wanted).max() < 2e-4
    unrounded = weight.astype(np.float64) @ v[:50] / weight.astype(np.float64).sum(-1)[:, None]
    assert np.abs(wanted - unrounded).max() > 5e-4
    assert rescales == 0


def test_rescales_are_the_records_of_the_tiles_maxima(attention):
    x = attention.operands(queries=9, keys=640, visible=640, scale=1.0, seed=3)
    maxima = (x.q_TD @ x.k_KD.T).unflatten(1, (10, 64)).amax(-1).tolist()
    wanted = sum(sum(m > max(row[:i]) for i, m in enumerate(row) if i) for row in maxima)
    assert attention.tiled(x, attention.ARITHMETIC["fp32, IEEE products"])[1] == wanted / 9


@pytest.mark.parametrize("anchor", [1, 100, 256])
def test_ours_has_the_draft_masks_result(attention, anchor):
    x = attention.draft_operands(context=256, anchor=anchor, block=8, scale=1.0, seed=1)
    assert x.mask_TK.sum(-1).tolist() == [anchor + 8] * 8
    found, times = attention.ours(x, anchor, "reference", "cpu")
    errors = attention.errors(found, attention.exact(x))
    assert times == {} and max(errors.values()) < 3e-3


def test_shares_follow_from_the_uniform_anchor(claims):
    share, half = claims.visible_shares(4096, 512, 16)
    assert half == pytest.approx(0.5, abs=0.01)
    assert share == pytest.approx((half * 4096 + 16) / (4096 + 512 * 16), rel=1e-9)


def test_loss_and_gradient_are_those_of_a_written_softmax(claims):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator).double() for n in (4, 11))
    labels = torch.tensor([0, 3, 10, 5])
    loss, gradient = claims.loss_and_gradient(hidden, weight, labels, upcast=False)
    logits = hidden.numpy() @ weight.numpy().T
    P = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = np.arange(4), labels.numpy()
    assert np.allclose(loss.numpy(), -np.log(P[picked]), rtol=1e-12)
    P[picked] -= 1
    assert np.allclose(gradient.numpy(), P @ weight.numpy(), rtol=1e-10, atol=1e-12)
    ours = claims.our_head(hidden.float(), weight.float(), labels)
    assert np.allclose(ours[0].numpy(), loss.numpy(), rtol=1e-5)
    assert np.allclose(ours[1].numpy(), gradient.numpy(), rtol=1e-4, atol=1e-5)


def test_a_bf16_sum_of_ones_stands_still_at_256_and_is_finite(claims):
    lse, stock = claims.bf16_sum_of_exponentials(163840)
    assert lse == math.log(256)
    assert stock == pytest.approx(math.log(163840), rel=2**-8)


@pytest.mark.slow
def test_float_repairs_the_gradient_of_wrong_tokens(claims):
    wrong, repaired = claims.logit_gradient_errors(163840)
    assert wrong > 0.01 > 0.003 > repaired
