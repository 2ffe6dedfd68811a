"""Attention of blocks: every implementation against float64, and what must not happen."""

import math

import pytest
import torch

from titan_lowprec.models.dflash.attention import build_mask, draft_attention, float32_options
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.testing.accuracy import relative_l2

FLEX_FP32 = ("flex_fp32_ieee", "flex_fp32_tf32")


@pytest.fixture
def case(make_args, make_batch):
    """A mask with unused slots, and operands with two query heads to a KV head."""

    def make(dtype=torch.float32, **changes):
        args = make_args(**changes)
        batch = make_batch(args, (9, 1, 12), (30,), (4, 3), tokens=30, learned=0.8)
        q = torch.randn(3, 4, batch.mask.queries, 16)
        k, v = (torch.randn(3, 2, batch.mask.keys, 16) for _ in range(2))
        return batch.mask, [x.to(dtype) for x in (q, k, v)]

    return make


def truth(q, k, v, allowed):
    """Softmax over allowed keys, query by query, in float64; zeros where there are none."""
    q, k, v = (x.double() for x in (q, k, v))
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            seen = allowed[b, t].nonzero()[:, 0]
            for h in range(q.shape[1] if len(seen) else 0):
                j = h // (q.shape[1] // k.shape[1])
                weight = torch.softmax(k[b, j, seen] @ q[b, h, t] / math.sqrt(q.shape[3]), 0)
                out[b, h, t] = weight @ v[b, j, seen]
    return out


def test_reference_is_softmax_over_allowed_keys(case):
    mask, (q, k, v) = case()
    out = draft_attention(q, k, v, mask=build_mask(mask, impl="reference"), impl="reference")
    assert relative_l2(out, truth(q, k, v, mask.dense())) < 5e-7


def test_reference_gradients_are_right(case):
    mask, operands = case(torch.float64, anchor_slots=2, block_tokens=2)
    dense = mask.dense()[:1]
    leaves = [x[:1].requires_grad_() for x in operands]

    def attend(q, k, v):
        return draft_attention(q, k, v, mask=dense, impl="reference")

    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def errors(impl, operands, dense, grad):
    """Error of output and gradients against float64, in roundings of a bf16 result."""
    exact = [x.double().requires_grad_() for x in operands]
    actual = [x.clone().requires_grad_() for x in operands]
    results = []
    for name, leaves in (("reference", exact), (impl, actual)):
        out = draft_attention(*leaves, mask=dense, impl=name)
        out.backward(grad.to(out.dtype))
        results.append([out.detach(), *(x.grad for x in leaves)])
    return [
        relative_l2(a, e) / relative_l2(e.bfloat16(), e)
        for e, a in zip(results[0], results[1], strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_written_out_kernels_have_the_errors_of_the_kernels(dtype):
    # On an H200 flex_bf16 has 1.21, 1.51, 1.48, 1.41 at these sizes (README.md), flex_fp32_ieee
    # 1.00 each; there a weight is rounded relative to the maximum of some tiles, not of all.
    q, grad = (torch.randn(1, 4, 300, 64).bfloat16().to(dtype) for _ in range(2))
    k, v = (torch.randn(1, 2, 600, 64).bfloat16().to(dtype) for _ in range(2))
    allowed = torch.rand(1, 300, 600) < 0.4
    allowed[:, -20:] = False
    exact = errors("reference_flex_fp32", (q, k, v), allowed, grad)
    assert exact == pytest.approx([1, 1, 1, 1], abs=0.01)
    rounded = errors("reference_flex_bf16", (q, k, v), allowed, grad)
    assert rounded == pytest.approx([1.33, 1.43, 1.42, 1.41], abs=0.05)


def test_written_out_bf16_rounds_weights_before_their_division(case):
    mask, (q, k, v) = case(torch.bfloat16)
    q, k, v = q[:, :1], k[:, :1], v[:, :1]
    out = draft_attention(q, k, v, mask=mask.dense(), impl="reference_flex_bf16")
    score = (q.double() @ k.double().transpose(-1, -2)) / 4
    score = score.masked_fill(~mask.dense()[:, None], -torch.inf)
    weight = torch.exp(score - score.amax(-1, keepdim=True).clamp_min(-1e9))
    total = weight.sum(-1, keepdim=True).clamp_min(1e-9)
    expected = (weight.bfloat16().double() @ v.double() / total).bfloat16()
    assert relative_l2(out, expected) < 2e-4
    assert (out == expected).double().mean() > 0.99


@pytest.mark.parametrize("impl", FLEX_FP32)
def test_fp32_flex_rounds_its_output_only(case, impl):
    mask, operands = case(torch.bfloat16)
    with torch.no_grad():
        out = draft_attention(*operands, mask=build_mask(mask, impl=impl), impl=impl)
    assert out.dtype == torch.bfloat16
    exact = truth(*operands, mask.dense())
    assert relative_l2(out, exact) <= 1.001 * relative_l2(exact.bfloat16(), exact)


def test_bf16_flex_is_less_exact_than_fp32(case):
    mask, operands = case(torch.bfloat16)
    sparse = build_mask(mask, impl="flex_bf16")
    with torch.no_grad():
        out = draft_attention(*operands, mask=sparse, impl="flex_bf16")
    exact = truth(*operands, mask.dense())
    floor = relative_l2(exact.bfloat16(), exact)
    assert 1.02 * floor < relative_l2(out, exact) < 4 * floor


@pytest.mark.parametrize("impl", ["reference", "flex_fp32_ieee"])
def test_autocast_does_not_undo_the_conversion(case, impl):
    mask, operands = case()
    prepared = build_mask(mask, impl=impl)
    with torch.no_grad():
        plain = draft_attention(*operands, mask=prepared, impl=impl)
        with torch.autocast("cpu", torch.bfloat16):
            inside = draft_attention(*operands, mask=prepared, impl=impl)
    assert inside.dtype == torch.float32 and torch.equal(plain, inside)


@pytest.mark.parametrize("setting", ["highest", "high"])
def test_fp32_precision_is_named_not_inherited(setting, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: setting)
    assert float32_options("flex_fp32_ieee") == {"FLOAT32_PRECISION": "'ieee'"}
    assert float32_options("flex_fp32_tf32") == {"FLOAT32_PRECISION": "'tf32'"}


@pytest.mark.parametrize("impl", ["flex_bf16", *FLEX_FP32])
def test_flex_without_a_cpu_backward_is_refused(case, impl):
    mask, (q, k, v) = case(torch.bfloat16)
    prepared = build_mask(mask, impl=impl)
    with pytest.raises(NotImplementedError, match=r"no backward pass on a CPU.*reference"):
        draft_attention(q, k.requires_grad_(), v, mask=prepared, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "flex_fp32_ieee"])
def test_unused_slots_give_zeros(case, impl):
    mask, operands = case()
    unused = ~mask.anchors.keep_BA.repeat_interleave(mask.block_tokens, dim=1)
    assert bool(unused.any())
    with torch.no_grad():
        out = draft_attention(*operands, mask=build_mask(mask, impl=impl), impl=impl)
    assert bool((out.transpose(1, 2)[unused] == 0).all())
    assert bool((out.transpose(1, 2)[~unused] != 0).all())


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("impl", ["reference", "reference_flex_bf16", "reference_flex_fp32"])
def test_gradients_of_fully_masked_rows_are_finite(case, make_anchors, kept, impl):
    mask, operands = case(anchor_slots=2)
    anchors = (
        make_anchors((2, None), (None, None), (1, 3)) if kept else make_anchors(*[(None,)] * 3)
    )
    mask = DraftMask(anchors, mask.document_BS, mask.block_tokens)
    q, k, v = operands
    leaves = [
        x.clone().requires_grad_()
        for x in (q[:, :, : mask.queries], k[:, :, : mask.keys], v[:, :, : mask.keys])
    ]
    out = draft_attention(*leaves, mask=mask.dense(), impl=impl)
    out.square().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in leaves)
    unused = ~anchors.keep_BA.repeat_interleave(mask.block_tokens, dim=1)
    assert bool((leaves[0].grad.transpose(1, 2)[unused] == 0).all())
    assert all(bool((x.grad != 0).any()) == kept for x in leaves)


@pytest.mark.parametrize("wrong", ["float", "int", "blocks"])
def test_mask_that_would_be_added_as_numbers_is_refused(case, wrong):
    mask, operands = case()
    dense = mask.dense()
    form = {"float": dense.float(), "int": dense.int(), "blocks": mask.block_sparse()}[wrong]
    # With run-time checks of shapes, numbers are refused by those.
    with pytest.raises(Exception, match=r"bool|mask"):
        draft_attention(*operands, mask=form, impl="reference")
    with pytest.raises(TypeError, match="BlockMask"):
        draft_attention(*operands, mask=dense, impl="flex_fp32_ieee")


def test_bool_mask_hides_keys_however_large_their_scores(case):
    # A mask added as a number raises allowed scores by 1: keys with scores of 1e3 would win.
    mask, (q, k, v) = case()
    dense = mask.dense()
    hidden = ~dense.any(1)
    assert bool(hidden.any())
    large = torch.where(hidden[:, None, :, None], 1e3 * k.sign(), k)
    out, plain = (draft_attention(q, x, v, mask=dense, impl="reference") for x in (large, k))
    assert torch.equal(out, plain)


@pytest.mark.parametrize("impl", ["reference", "flex_fp32_ieee"])
def test_one_hot_features_count_the_tokens_before_the_anchor(make_args, make_batch, impl):
    # With equal scores, attention is a mean: of one-hot ids it is their histogram, exactly.
    args = make_args(vocab_size=11, mask_id=10)
    batch = make_batch(args, (13, 17), (26,), tokens=30)
    mask, V = batch.mask, 16
    one_hot = torch.nn.functional.one_hot(batch.tokens, V).float()
    v = torch.cat((one_hot, torch.zeros(2, mask.queries, V)), dim=1)[:, None]
    q, k = torch.zeros(2, 1, mask.queries, V), torch.zeros(2, 1, mask.keys, V)
    with torch.no_grad():
        out = draft_attention(q, k, v, mask=build_mask(mask, impl=impl), impl=impl)
    for b in range(2):
        for j, a in enumerate(batch.anchors.position_BA[b].tolist()):
            start = a - int(batch.position[b, a])
            histogram = torch.bincount(batch.tokens[b, start:a], minlength=V)
            mean = histogram / (a - start + args.block_tokens)
            got = out[b, 0, j * args.block_tokens : (j + 1) * args.block_tokens]
            torch.testing.assert_close(got, mean.expand_as(got), rtol=1e-6, atol=1e-7)


def test_heads_that_do_not_share_evenly_are_refused(case):
    mask, (q, k, v) = case()
    with pytest.raises(ValueError, match="multiple of J"):
        draft_attention(q[:, :3], k, v, mask=mask.dense(), impl="reference")


def test_bf16_flex_refuses_other_dtypes(case):
    mask, operands = case()
    with torch.no_grad(), pytest.raises(TypeError, match="flex_bf16 needs bf16"):
        draft_attention(*operands, mask=mask.block_sparse(), impl="flex_bf16")
