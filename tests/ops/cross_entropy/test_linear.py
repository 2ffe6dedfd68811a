"""`linear_cross_entropy`: the reference against float64, and what the op promises its callers."""

import math

import pytest
import torch
import torch.nn.functional as F

from titan_lowprec.ops.cross_entropy.api import HeadSpec, linear_cross_entropy
from titan_lowprec.ops.cross_entropy.common import join_float32, split_float32

OP = torch.ops.titan_lowprec.linear_cross_entropy_forward.default


def run(head, factor=1.0, **changes):
    hidden, weight = head.leaves()
    loss, per_token, lse = linear_cross_entropy(
        hidden, weight, head.labels, **head.options(**changes)
    )
    (loss * factor).backward()
    return loss.detach(), per_token, lse, hidden.grad, weight.grad


def assert_exact(head, times_floor, factor=1.0, **changes):
    """Loss to 1e-6 of float64, gradients to 1.1 roundings; the incoming gradient included."""
    loss, per_token, lse, grad_hidden, grad_weight = run(head, factor, **changes)
    truth = head.truth(factor)
    assert loss.dtype == per_token.dtype == lse.dtype == torch.float32
    assert grad_hidden.dtype == grad_weight.dtype == head.hidden.dtype
    assert abs(loss.double() / truth["loss"] - 1) < 1e-6
    torch.testing.assert_close(per_token.double(), truth["per_token"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth["lse"], rtol=1e-6, atol=2e-6)
    assert times_floor(grad_hidden, truth["hidden"]) < 1.1
    assert times_floor(grad_weight, truth["weight"]) < 1.1


@pytest.mark.parametrize("chunk_rows", [1, 64, 100, 301, 4096])
@pytest.mark.parametrize("order", ["as drawn", "by label", "reversed"])
def test_exact_for_any_chunk_and_row_order(make_head, times_floor, chunk_rows, order):
    head = make_head(301, 32, 517)
    rows = {
        "as drawn": torch.arange(301),
        "by label": head.labels.argsort(),
        "reversed": torch.arange(301).flip(0),
    }[order]
    head.hidden, head.labels = head.hidden[rows], head.labels[rows]
    assert_exact(head, times_floor, chunk_rows=chunk_rows)


@pytest.mark.parametrize("factor", [1 / 3, 1 / 7919, -4.0], ids=str)
def test_incoming_gradient_is_multiplied_in_before_the_rounding(make_head, times_floor, factor):
    assert_exact(make_head(200, 32, 517), times_floor, factor)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_options(make_head, times_floor, z_loss, softcap, weighted):
    head = make_head(130, 32, 257, std=2.0, weighted=weighted, z_loss=z_loss, softcap=softcap)
    assert_exact(head, times_floor, 0.3)


@pytest.mark.parametrize("V", [163_840, 163_841, 129_920, 128_256, 50_257])
def test_real_vocabularies(make_head, times_floor, V):
    assert_exact(make_head(24, 8, V), times_floor, chunk_rows=16)


@pytest.mark.parametrize("V", [1, 2])
def test_tiny_vocabularies(make_head, V):
    head = make_head(9, 8, V, dtype=torch.float64)
    _, per_token, _, grad_hidden, _ = run(head)
    truth = head.truth()
    torch.testing.assert_close(per_token, truth["per_token"])
    torch.testing.assert_close(grad_hidden, truth["hidden"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_dtypes(make_head, dtype):
    head = make_head(50, 16, 97, dtype=dtype, z_loss=1e-3)
    loss, _, _, grad_hidden, grad_weight = run(head, 0.3)
    truth = head.truth(0.3)
    tolerance = {torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(loss.double() / truth["loss"] - 1) < max(1e-14, min(tolerance, 1e-6))
    for actual, name in ((grad_hidden, "hidden"), (grad_weight, "weight")):
        assert actual.dtype == dtype
        assert (actual.double() - truth[name]).norm() < tolerance * truth[name].norm()


def test_gradcheck(make_head):
    head = make_head(7, 4, 11, dtype=torch.float64, weighted=True, z_loss=0.1, softcap=2.0)
    options = head.options(chunk_rows=3)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, head.labels, **options)[0], head.leaves()
    )


def test_confident_rows_keep_their_digits(make_head):
    head = make_head(64, 16, 64, dtype=torch.float32, ignored=0.0)
    head.weight = torch.eye(64)[:, :16].contiguous()
    head.labels = torch.arange(64) % 16
    head.hidden = F.one_hot(head.labels, 16).float() * 18.0
    loss, _, _, grad_hidden, _ = run(head)
    truth = head.truth()
    assert 1e-9 < truth["loss"] / 64 < 1e-5
    assert abs(loss.double() / truth["loss"] - 1) < 1e-6
    assert (grad_hidden.double() - truth["hidden"]).norm() < 1e-6 * truth["hidden"].norm()
    stock = F.cross_entropy(head.hidden @ head.weight.T, head.labels, reduction="sum")
    assert abs(stock.double() / truth["loss"] - 1) > 1e-3  # lse - logit cancels


def test_all_ignored_is_a_connected_zero(make_head):
    head = make_head(40, 16, 97, ignored=1.1, z_loss=1e-2)
    loss, per_token, _, grad_hidden, grad_weight = run(head)
    assert loss == 0 and not per_token.any()
    assert not grad_hidden.any() and not grad_weight.any()


def test_no_rows_is_a_connected_zero(make_head):
    loss, per_token, lse, grad_hidden, grad_weight = run(make_head(0, 16, 97))
    assert loss == 0 and per_token.shape == lse.shape == (0,)
    assert grad_hidden.shape == (0, 16) and not grad_weight.any()


def test_non_finite_ignored_rows_reach_nothing(make_head):
    head = make_head(40, 16, 97)
    head.labels[:3] = -100
    expected = run(head)
    head.hidden[0], head.hidden[1], head.hidden[2] = math.nan, math.inf, -math.inf
    actual = run(head)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[3], expected[3]) and torch.equal(actual[4], expected[4])


def test_token_weight_0_equals_ignored(make_head):
    head = make_head(40, 16, 97, ignored=0.0)
    head.token_weight = torch.ones(40)
    head.token_weight[::3] = 0
    by_weight = run(head)
    head.token_weight = None
    head.labels[::3] = -100
    ignored = run(head)
    for which in (0, 1, 3, 4):
        assert torch.equal(by_weight[which], ignored[which])
    torch.testing.assert_close(by_weight[2], ignored[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [97, -1, 2**40])
def test_out_of_range_label_is_refused(make_head, bad):
    head = make_head(40, 16, 97)
    head.labels[3] = bad
    with pytest.raises(ValueError, match=rf"\[0, 97\).*got {bad} in row 3"):
        run(head)


def test_frozen_head_forms_no_weight_gradient(make_head):
    head = make_head(40, 16, 97)
    hidden, weight = head.leaves()
    expected = run(head)
    weight.requires_grad_(False)
    loss, _, _ = linear_cross_entropy(hidden, weight, head.labels, **head.options())
    assert [tuple(saved.shape) for saved in loss.grad_fn.saved_tensors] == [
        (40, 16),
        (0, 16),
        (0, 16),
    ]
    loss.backward()
    assert weight.grad is None and torch.equal(hidden.grad, expected[3])


def test_frozen_hidden_forms_no_hidden_gradient(make_head):
    head = make_head(40, 16, 97)
    expected = run(head)
    hidden, weight = head.leaves()
    hidden.requires_grad_(False)
    loss, _, _ = linear_cross_entropy(hidden, weight, head.labels, **head.options())
    loss.backward()
    assert hidden.grad is None and torch.equal(weight.grad, expected[4])


def test_without_gradients_the_values_are_the_same(make_head):
    head = make_head(40, 16, 97)
    with torch.no_grad():
        values = linear_cross_entropy(*head.leaves(), head.labels, **head.options())
    for value, expected in zip(values, run(head)[:3], strict=True):
        assert torch.equal(value, expected) and not value.requires_grad


def test_per_token_loss_and_lse_refuse_a_gradient(make_head):
    head = make_head(40, 16, 97)
    _, per_token, lse = linear_cross_entropy(*head.leaves(), head.labels, **head.options())
    for value in (per_token, lse):
        with pytest.raises(RuntimeError, match="does not require grad"):
            value.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_second_backward_raises_or_repeats_never_scales_twice(make_head, dtype):
    head = make_head(40, 16, 97, dtype=dtype)
    hidden, weight = head.leaves()
    loss, _, _ = linear_cross_entropy(hidden, weight, head.labels, **head.options())
    first = torch.autograd.grad(loss * 0.3, (hidden, weight), retain_graph=True)
    if dtype == torch.bfloat16:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss * 0.3, (hidden, weight))
    else:
        second = torch.autograd.grad(loss * 0.3, (hidden, weight))
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_gradient_of_the_head_is_not_copied_again(make_head):
    head = make_head(40, 16, 97)
    hidden, weight = head.leaves()
    loss, _, _ = linear_cross_entropy(hidden, weight, head.labels, **head.options())
    saved = loss.grad_fn.saved_tensors[1].data_ptr()
    loss.backward()
    assert weight.grad.data_ptr() == saved


def test_twice_is_the_same_in_bits(make_head):
    head = make_head(130, 32, 257)
    for a, b in zip(run(head), run(head), strict=True):
        assert torch.equal(a, b)


def test_accumulated_micro_batches_equal_one_batch(make_head):
    head = make_head(128, 16, 97, dtype=torch.float32)
    hidden, weight = head.leaves()
    for part in torch.arange(128).split(32):
        loss, _, _ = linear_cross_entropy(hidden[part], weight, head.labels[part], **head.options())
        (loss / 128).backward()
    whole = run(head, 1 / 128)
    torch.testing.assert_close(hidden.grad, whole[3], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(weight.grad, whole[4], rtol=1e-5, atol=1e-8)


def test_transposed_hidden_is_read_by_its_strides(make_head):
    head = make_head(40, 16, 97)
    expected = run(head)
    head.hidden = head.hidden.T.contiguous().T
    for a, b in zip(run(head), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.zeros(97, 15, dtype=torch.bfloat16)}, "share E"),
        ({"weight": torch.zeros(97, 16)}, "one dtype"),
        ({"labels": torch.zeros(39, dtype=torch.int64)}, "one per row"),
        ({"token_weight": torch.ones(40, dtype=torch.bfloat16)}, "must be fp32"),
        ({"token_weight": torch.ones(40, requires_grad=True)}, "constants"),
    ],
    ids=["width", "dtype", "rows", "weights", "weights-grad"],
)
def test_operands_that_do_not_fit_are_refused(make_head, change, message):
    head = make_head(40, 16, 97)
    for name, value in change.items():
        setattr(head, name, value)
    with pytest.raises((ValueError, TypeError), match=f"{message}|Type-check"):
        linear_cross_entropy(head.hidden, head.weight, head.labels, **head.options())


@pytest.mark.parametrize(
    "change, message",
    [({"chunk_rows": 0}, "chunk_rows"), ({"impl": "auto"}, "resolve 'auto'")],
)
def test_options_that_do_not_fit_are_refused(change, message):
    options = {"ignore_index": -100, "chunk_rows": 8, "z_loss": 0.0, "softcap": None}
    with pytest.raises((ValueError, TypeError), match=f"{message}|Type-check"):
        HeadSpec(**(options | {"impl": "reference"} | change))


@pytest.mark.parametrize("need", [(True, True), (True, False), (False, True), (False, False)])
def test_opcheck(make_head, need):
    head = make_head(20, 8, 33)
    hidden, weight = head.leaves()
    hidden.requires_grad_(need[0])
    weight.requires_grad_(need[1])
    options = (-100, 8, 0.0, None, "reference", None)
    arguments = (hidden, weight, head.labels, None, *options, *need, False)
    torch.library.opcheck(OP, arguments)


def test_opcheck_of_the_rounding():
    high, low = split_float32(torch.randn(6, 8))
    op = torch.ops.titan_lowprec.linear_cross_entropy_round.default
    arguments = (high, low, torch.tensor(0.3), torch.bfloat16, "reference")
    torch.library.opcheck(op, arguments)
    value = join_float32(high, low)
    assert torch.equal(op(*arguments), (value * torch.tensor(0.3)).bfloat16())


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, 2.0**-149, math.inf, math.nan, 1 / 3])
def test_split_storage_keeps_every_bit(value):
    x = torch.tensor([[value]])
    assert torch.equal(join_float32(*split_float32(x)).view(torch.int32), x.view(torch.int32))


@pytest.mark.compile
def test_compiled_equals_eager(make_head):
    head = make_head(40, 16, 97, weighted=True, z_loss=1e-3)
    expected = run(head, 0.3)

    def step(hidden, weight, labels, token_weight):
        options = head.options(token_weight_N=token_weight)
        return linear_cross_entropy(hidden * 1, weight, labels, **options)

    hidden, weight = head.leaves()
    compiled = torch.compile(step, fullgraph=True)
    loss, per_token, lse = compiled(hidden, weight, head.labels, head.token_weight)
    (loss * 0.3).backward()
    for a, b in zip((loss, per_token, lse, hidden.grad, weight.grad), expected, strict=True):
        assert torch.equal(a, b)
    head.labels[3] = 97
    with pytest.raises(ValueError, match="in row 3"):
        compiled(hidden, weight, head.labels, head.token_weight)
