"""`cross_entropy` from logits against float64 and against PyTorch's own loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from titan_lowprec.ops.cross_entropy.api import cross_entropy

OFF = {"ignore_index": -100, "z_loss": 0.0, "softcap": None}


def rows(N=67, V=131, dtype=torch.float32, scale=2.0):
    generator = torch.Generator().manual_seed(N * V)
    logits = torch.randn(N, V, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::5] = -100
    return logits.to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_value_and_gradient_match_float64(dtype, z_loss, softcap):
    logits, labels = rows(dtype=dtype)
    logits.requires_grad_()
    loss, per_token, lse = cross_entropy(
        logits, labels, ignore_index=-100, z_loss=z_loss, softcap=softcap
    )
    (loss * 0.25).backward()

    truth = logits.detach().double().requires_grad_()
    x = truth if softcap is None else softcap * torch.tanh(truth / softcap)
    expected_lse = x.logsumexp(1)
    expected = F.cross_entropy(x, labels, reduction="none", ignore_index=-100)
    expected = expected + z_loss * expected_lse.square() * (labels != -100)
    (expected.sum() * 0.25).backward()

    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == per_token.dtype == lse.dtype == accumulate
    assert logits.grad.dtype == dtype
    assert abs(loss.double() / expected.sum() - 1) < 1e-6
    torch.testing.assert_close(per_token.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    # one rounding of the exact gradient, or fp32 arithmetic
    floor = (truth.grad.to(dtype).double() - truth.grad).norm()
    error = (logits.grad.double() - truth.grad).norm()
    assert error <= 1.1 * floor + 1e-6 * truth.grad.norm()


def test_bf16_logits_keep_an_fp32_loss_where_pytorch_rounds_it_to_bf16():
    logits, labels = rows(N=512, V=1000, dtype=torch.bfloat16)
    truth = F.cross_entropy(logits.double(), labels, reduction="sum")
    loss, _, _ = cross_entropy(logits, labels, **OFF)
    stock = F.cross_entropy(logits, labels, reduction="sum")
    assert abs(loss.double() / truth - 1) < 1e-6
    assert abs(stock.double() / truth - 1) > 1e-5


def test_all_ignored_is_a_zero_with_a_zero_gradient():
    logits, labels = rows()
    logits.requires_grad_()
    loss, per_token, _ = cross_entropy(logits, torch.full_like(labels, -100), **OFF)
    assert loss == 0 and not per_token.any()
    loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_no_rows_is_a_connected_zero():
    logits = torch.zeros(0, 7, requires_grad=True)
    loss, _, _ = cross_entropy(logits, torch.zeros(0, dtype=torch.int64), **OFF)
    loss.backward()
    assert loss == 0 and logits.grad.shape == (0, 7)


@pytest.mark.parametrize("bad", [131, -1, 2**40])
def test_out_of_range_label_is_refused(bad):
    logits, labels = rows()
    labels[3] = bad
    with pytest.raises(ValueError, match=rf"got {bad} in row 3 \(1 such rows\)"):
        cross_entropy(logits, labels, **OFF)


def test_labels_equal_to_another_ignore_index_are_ignored():
    logits, labels = rows()
    labels[labels == -100] = 7
    loss, per_token, _ = cross_entropy(logits, labels, ignore_index=7, z_loss=0.0, softcap=None)
    assert not per_token[labels == 7].any()
    truth = F.cross_entropy(logits.double(), labels, ignore_index=7, reduction="sum")
    assert abs(loss.double() / truth - 1) < 1e-6


def test_bad_options_and_label_dtype_are_refused():
    logits, labels = rows()
    with pytest.raises(ValueError, match="softcap"):
        cross_entropy(logits, labels, ignore_index=-100, z_loss=0.0, softcap=0.0)
    with pytest.raises(ValueError, match="z_loss"):
        cross_entropy(logits, labels, ignore_index=-100, z_loss=math.inf, softcap=None)
    with pytest.raises(TypeError):
        cross_entropy(logits, labels.int(), **OFF)


def test_gradcheck_float64():
    logits, labels = rows(N=5, V=7, dtype=torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, labels, ignore_index=-100, z_loss=0.1, softcap=3.0), (logits,)
    )


@pytest.mark.compile
def test_compiled_equals_eager_and_poisons_a_bad_label():
    logits, labels = rows(dtype=torch.bfloat16)
    logits.requires_grad_()
    compiled = torch.compile(cross_entropy, fullgraph=True)
    loss, per_token, _ = compiled(logits, labels, **OFF)
    expected, expected_rows, _ = cross_entropy(logits, labels, **OFF)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(per_token, expected_rows, rtol=1e-5, atol=1e-6)
    (compiled_grad,) = torch.autograd.grad(loss, logits)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(compiled_grad, expected_grad, rtol=1e-2, atol=1e-6)

    for bad in (131, -1):
        labels[3] = bad
        loss, per_token, _ = compiled(logits, labels, **OFF)
        assert loss.isnan() and per_token.isnan().nonzero().flatten().tolist() == [3]
