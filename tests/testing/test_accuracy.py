"""The measures that other tests rely on, against hand-computed values and PyTorch."""

import pytest
import torch

from titan_lowprec.testing.accuracy import (
    assert_as_accurate,
    attention_truth,
    cosine,
    relative_l2,
    row_gain_error,
)
from titan_lowprec.testing.cases import SMALL_CASES, PackedCase, packed_inputs
from titan_lowprec.testing.poison import poisoned, poisoned_allocations


def test_measures_of_known_vectors():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    assert cosine(a, b) == pytest.approx(24 / 25)
    assert relative_l2(a, b) == pytest.approx(2**0.5 / 5)
    assert relative_l2(torch.zeros(2), torch.zeros(2)) == 0.0
    assert row_gain_error(1.5 * a, a) == pytest.approx(0.5)


def test_an_error_beyond_the_factor_fails_and_one_within_passes():
    truth = {"x": torch.ones(1000, dtype=torch.float64)}
    eager = {"x": torch.full((1000,), 1.01)}
    assert_as_accurate("op", {"x": torch.full((1000,), 1.0124)}, eager, truth)
    with pytest.raises(AssertionError, match="x must be at most"):
        assert_as_accurate("op", {"x": torch.full((1000,), 1.0126)}, eager, truth)
    with pytest.raises(AssertionError, match=r"bfloat16"):
        assert_as_accurate("op", {"x": eager["x"].bfloat16()}, eager, truth)


def test_the_truth_is_sdpa_in_float64_with_its_gradients():
    case = PackedCase(rows=((9, 17),), heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    inputs = packed_inputs(case, kind="gaussian", strength=1.0, seed=0, device="cpu")
    truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask="causal")
    q, k, v, g = (x.double().transpose(0, 1) for x in inputs.tensors())
    part = slice(9, 26)
    leaves = [x[:, part].detach().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x[None] for x in leaves), is_causal=True, enable_gqa=True
    )[0]
    expected = (out, *torch.autograd.grad(out, leaves, g[:, part]))
    actual = (truth.out_NHD, truth.dq_NHD, truth.dk_NJD, truth.dv_NJD)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a[part].transpose(0, 1), b.detach())


def test_cases_have_distinct_ids_and_offsets_that_cover_their_documents():
    assert len({case.id for case in SMALL_CASES}) == len(SMALL_CASES)
    case = PackedCase(rows=((5, 0, 90), (33,)), heads=3, kv_heads=1, head_dim=32, tail_tokens=2)
    assert case.id == "R2-docs5.0.90_33-tail2-H3-J1-D32-bf16"
    assert case.cu_seqlens(device="cpu").tolist() == [[0, 5, 5, 95], [0, 33, 33, 33]]
    assert case.total_tokens == 2 * 97
    assert case.pairs == 15 + 90 * 91 // 2 + 33 * 34 // 2


def test_inputs_are_reproducible_and_of_their_kind():
    case = SMALL_CASES[0]

    def draw(kind, strength):
        return packed_inputs(case, kind=kind, strength=strength, seed=3, device="cpu")

    assert torch.equal(draw("gaussian", 1.0).q_NHD, draw("gaussian", 1.0).q_NHD)
    peaked = draw("peaked", 0.5)
    assert torch.equal(peaked.q_NHD, (0.5 * draw("gaussian", 1.0).k_NJD.float()).bfloat16())
    hot = draw("hot_channel", 30.0)
    assert hot.k_NJD[..., 3].float().std() > 20 and hot.v_NJD[..., 3].float().std() < 2
    entries = draw("outlier_entries", 1000.0).v_NJD.float().abs()
    assert 0 < (entries > 50).float().mean() < 3e-3


def test_poison_fills_fresh_memory():
    assert poisoned(torch.zeros(3)).isnan().all()
    assert (poisoned(torch.zeros(3, dtype=torch.int32)) == 0x7F7F7F7F).all()
    with poisoned_allocations():
        assert torch.empty(4, dtype=torch.bfloat16).isnan().all()
        assert torch.empty_like(torch.zeros(2)).isnan().all()
    assert torch.empty is not None and not torch.zeros(2).isnan().any()
