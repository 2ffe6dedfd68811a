"""Blocks and the two objectives against float64 with all logits, and the step's denominator."""

import pytest
import torch

from titan_lowprec.models.dflash.blocks import IGNORE_INDEX, draft_blocks
from titan_lowprec.models.dflash.loss import (
    denominator,
    dpace_weights,
    draft_loss,
    mean_loss,
)
from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.testing.accuracy import relative_l2

HEAD = {"chunk_rows": 7, "impl": "reference"}


def test_blocks_written_out(make_args, make_anchors):
    args = make_args(block_tokens=4, gamma=2.0, mask_id=36)
    tokens = torch.arange(10, 20)[None]
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]])
    position = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
    loss_mask = torch.ones(1, 10, dtype=torch.bool)
    loss_mask[0, 2] = False
    blocks = draft_blocks(
        tokens,
        loss_mask_BS=loss_mask,
        document_BS=document,
        position_BS=position,
        anchors=make_anchors((0, 3, 7, None), unused=9),
        args=args,
    )
    x, m = IGNORE_INDEX, 36
    rows = [[10, m, m, m], [13, m, m, m], [17, m, m, m], [19, m, m, m]]
    assert blocks.input_BT.view(4, 4).tolist() == rows
    # Token 12 is not to be learned; 15 is another document's; after 19 the row ends.
    labels = [[x, 11, x, 13], [x, 14, x, x], [x, 18, 19, x], [x, x, x, x]]
    assert blocks.label_BT.view(4, 4).tolist() == labels
    positions = [[0, 1, 2, 3], [3, 4, 5, 6], [2, 3, 4, 5], [4, 5, 6, 7]]
    assert blocks.position_BT.view(4, 4).tolist() == positions
    decay = torch.exp(-torch.arange(-1, 3) / 2.0)
    expected = (torch.tensor(labels) != x) * decay
    torch.testing.assert_close(blocks.decay_BT.view(4, 4), expected)
    assert bool((blocks.decay_BT[0, ::4] == 0).all()), "the anchor has a weight"


def written_out_loss(hidden, blocks, tables, objective):
    """All logits at once, in float64, weights by the formulas block by block."""
    hidden = hidden.detach().double().requires_grad_()
    logits = (hidden * tables.output_multiplier) @ tables.head_VE.double().T
    if tables.softcap is not None:
        logits = tables.softcap * torch.tanh(logits / tables.softcap)
    log_p = torch.log_softmax(logits, -1)
    total, P = hidden.sum() * 0, blocks.block_tokens
    for b, labels in enumerate(blocks.label_BT.tolist()):
        for begin in range(0, len(labels), P):
            slots = [k for k in range(P) if labels[begin + k] != IGNORE_INDEX]
            own = {k: log_p[b, begin + k, labels[begin + k]] for k in slots}
            reached, product = {}, 1.0
            for k in slots:
                product *= 0.5 * float(own[k].detach().exp()) + 0.5
                reached[k] = product
            for k in slots:
                weight = float(blocks.decay_BT[b, begin + k])
                if objective == "dpace":
                    weight = sum(reached[i] for i in slots if i >= k)
                total = total - weight * own[k]
    total.backward()
    return total.detach(), hidden.grad


@pytest.fixture
def case(make_args, make_batch, make_tables):
    def make(dtype=torch.float32, **quirks):
        args = make_args()
        batch = make_batch(args, (9, 1, 12), (30,), (4, 3), tokens=30, learned=0.8)
        hidden = torch.randn(3, batch.mask.queries, args.model_dim)
        tables = make_tables(args, dtype=dtype, std=0.3, **quirks)
        return hidden.to(dtype).requires_grad_(), batch.blocks, tables

    return make


@pytest.mark.parametrize("objective", ["decay", "dpace"])
@pytest.mark.parametrize(
    "quirks", [{}, {"softcap": 2.0}, {"output_multiplier": 0.25}], ids=["plain", "cap", "multiply"]
)
@pytest.mark.parametrize("chunk_rows", [1, 7, 4096])
def test_chunked_loss_equals_all_logits_in_float64(case, objective, quirks, chunk_rows):
    hidden, blocks, tables = case(**quirks)
    options = HEAD | {"chunk_rows": chunk_rows}
    loss = draft_loss(hidden, blocks, tables, objective=objective, **options)
    loss.loss_sum.backward()
    total, gradient = written_out_loss(hidden, blocks, tables, objective)
    assert loss.loss_sum.dtype == torch.float32
    assert abs(float(loss.loss_sum.detach()) / float(total) - 1) < 1e-6
    assert relative_l2(hidden.grad, gradient) < 1e-6
    torch.testing.assert_close(loss.per_token_BT.sum(), loss.loss_sum.detach())


@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_bf16_gradient_is_rounded_once(case, objective):
    hidden, blocks, tables = case(torch.bfloat16)
    loss = draft_loss(hidden, blocks, tables, objective=objective, **HEAD)
    (loss.loss_sum / 7919).backward()
    total, gradient = written_out_loss(hidden, blocks, tables, objective)
    assert loss.loss_sum.dtype == torch.float32
    assert abs(float(loss.loss_sum.detach()) / float(total) - 1) < 1e-6
    floor = relative_l2((gradient / 7919).bfloat16(), gradient / 7919)
    assert relative_l2(hidden.grad, gradient / 7919) < 1.1 * floor


def test_head_gets_no_gradient(case):
    hidden, blocks, tables = case()
    draft_loss(hidden, blocks, tables, objective="decay", **HEAD).loss_sum.backward()
    assert tables.head_VE.grad is None and not tables.head_VE.requires_grad


def test_dpace_weights_written_out():
    q = torch.tensor([[[0.7, 1.0, 0.5, 0.0, 0.2]]])
    valid = torch.tensor([[[False, True, True, True, True]]])
    # s = 1, .75, .5, .6; products 1, .75, .375, .225.
    expected = torch.tensor([[[0, 2.35, 1.35, 0.6, 0.225]]])
    torch.testing.assert_close(dpace_weights(q, valid), expected)
    valid[..., 3] = False
    # Slot 3 does not count: products 1, .75, (skipped), .45.
    expected = torch.tensor([[[0, 2.2, 1.2, 0, 0.45]]])
    torch.testing.assert_close(dpace_weights(q, valid), expected)


def test_sure_and_right_drafts_weigh_every_slot_behind_them():
    valid = torch.ones(1, 1, 6, dtype=torch.bool)
    valid[..., 0] = False
    weights = dpace_weights(torch.ones(1, 1, 6), valid)
    assert weights.tolist() == [[[0, 5, 4, 3, 2, 1]]]


@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_denominator_needs_no_forward_pass(case, objective):
    _, blocks, _ = case()
    labels = (blocks.label_BT != IGNORE_INDEX).view(-1, blocks.block_tokens)
    expected = {"decay": blocks.decay_BT.sum(), "dpace": labels.any(1).sum().float()}
    torch.testing.assert_close(denominator(blocks, objective=objective), expected[objective])
    assert float(denominator(blocks, objective="decay")) != int(labels.sum())


@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_ranks_and_micro_batches_add_up_even_without_anchors(
    make_args, make_batch, make_tables, objective
):
    args = make_args()
    whole = make_batch(args, (30,), (4, 3), (1, 1, 1), tokens=30, learned=0.9)
    tables, model = make_tables(args, std=0.3), DraftModel(args)
    model.init_weights(std=0.1)

    def rows(part):
        cut = {
            name: getattr(whole, name)[part]
            for name in ("tokens", "loss_mask", "document", "position", "features")
        }
        anchors = type(whole.anchors)(whole.anchors.position_BA[part], whole.anchors.keep_BA[part])
        return type(whole)(args=args, anchors=anchors, **cut)

    def gradients(parts):
        model.zero_grad()
        batches = [rows(part) for part in parts]
        total = sum(denominator(b.blocks, objective=objective) for b in batches)
        for batch in batches:
            hidden = batch.hidden(model, tables)
            loss = draft_loss(hidden, batch.blocks, tables, objective=objective, **HEAD)
            mean_loss(loss.loss_sum, total).backward()
        return [p.grad.clone() for p in model.parameters()]

    assert not bool(rows(slice(2, 3)).anchors.keep_BA.any())
    together = gradients([slice(0, 3)])
    apart = gradients([slice(0, 1), slice(1, 2), slice(2, 3)])
    assert float(sum(g.norm() for g in together)) > 0
    for a, b in zip(apart, together, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    alone = gradients([slice(2, 3)])
    assert len(alone) == len(together), "a parameter without a gradient would hang a reduction"
    assert all(bool((g == 0).all()) for g in alone)


def test_step_without_anchors_is_zero_not_nan(case):
    hidden, blocks, tables = case()
    empty = type(blocks)(
        blocks.input_BT,
        blocks.position_BT,
        torch.full_like(blocks.label_BT, IGNORE_INDEX),
        torch.zeros_like(blocks.decay_BT),
        blocks.block_tokens,
    )
    loss = draft_loss(hidden, empty, tables, objective="decay", **HEAD)
    mean = mean_loss(loss.loss_sum, denominator(empty, objective="decay"))
    mean.backward()
    assert float(mean.detach()) == 0 and bool((hidden.grad == 0).all())


def test_unknown_objective_is_refused(case):
    hidden, blocks, tables = case()
    # With run-time checks of types, the name is refused by those.
    with pytest.raises(Exception, match="objective"):
        draft_loss(hidden, blocks, tables, objective="uniform", **HEAD)
