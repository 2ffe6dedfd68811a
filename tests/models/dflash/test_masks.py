"""The mask against the rule written out for single queries and keys."""

import pytest
import torch

from titan_lowprec.models.dflash.anchors import Anchors
from titan_lowprec.models.dflash.attention import build_mask
from titan_lowprec.models.dflash.masks import FLEX_BLOCK, DraftMask


def written_out(mask):
    """DFlash's rule in plain Python, one pair at a time."""
    B, S, P = len(mask.document_BS), mask.document_BS.shape[1], mask.block_tokens
    position, keep = mask.anchors.position_BA.tolist(), mask.anchors.keep_BA.tolist()
    document = mask.document_BS.tolist()
    allowed = torch.zeros(B, mask.queries, mask.keys, dtype=torch.bool)
    for b in range(B):
        for query in range(mask.queries):
            j = query // P
            for key in range(mask.keys):
                if key < S:
                    a = position[b][j]
                    seen = key < a and document[b][key] == document[b][a]
                else:
                    seen = (key - S) // P == j
                allowed[b, query, key] = keep[b][j] and seen
    return allowed


@pytest.mark.parametrize("block_tokens", [3, 4, 16])
def test_dense_mask_is_the_rule(make_args, make_batch, block_tokens):
    args = make_args(block_tokens=block_tokens)
    batch = make_batch(args, (9, 1, 12), (30,), (4, 3), tokens=30, learned=0.8)
    assert bool((~batch.anchors.keep_BA).any()), "the case has no unused slot"
    assert torch.equal(batch.mask.dense(), written_out(batch.mask))


def test_anchor_itself_and_other_documents_are_hidden(make_anchors):
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    dense = DraftMask(make_anchors((2, 3, 5)), document, 2).dense()
    context = dense[0, ::2, :7].int().tolist()
    assert context == [[1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]]
    assert dense[0, 1, 7:].int().tolist() == [1, 1, 0, 0, 0, 0]


def test_neither_form_has_heads(make_args, make_batch):
    batch = make_batch(make_args(), (30,), (20,), tokens=30)
    assert tuple(build_mask(batch.mask, impl="reference").shape) == (2, 30, 60)
    sparse = build_mask(batch.mask, impl="flex_bf16")
    assert sparse.kv_num_blocks.shape[:2] == (2, 1)


@pytest.mark.parametrize("anchors", [1, 3, 26, 52])
def test_queries_need_not_fill_a_block(make_args, make_batch, anchors):
    args = make_args(anchor_slots=anchors)
    batch = make_batch(args, (60,), tokens=60)
    mask = batch.mask
    assert mask.queries % FLEX_BLOCK != 0 and mask.keys % FLEX_BLOCK != 0
    blocks = mask.block_sparse().to_dense()[0, 0].bool()
    Q, K = (-(-n // FLEX_BLOCK) for n in (mask.queries, mask.keys))
    padded = torch.zeros(Q * FLEX_BLOCK, K * FLEX_BLOCK, dtype=torch.bool)
    padded[: mask.queries, : mask.keys] = mask.dense()[0]
    expected = padded.view(Q, FLEX_BLOCK, K, FLEX_BLOCK).any(3).any(1)
    assert torch.equal(blocks, expected)


def test_indices_past_the_end_are_denied_not_read(make_args, make_batch):
    mask = make_batch(make_args(), (30,), (9,), tokens=30).mask
    whole = (torch.arange(n) for n in (4, 2 * FLEX_BLOCK, 2 * FLEX_BLOCK))
    b, query, key = torch.meshgrid(*whole, indexing="ij")
    allowed = mask.predicate()(b, b, query, key)
    assert torch.equal(allowed[:2, : mask.queries, : mask.keys], mask.dense())
    assert not bool(allowed[:, mask.queries :].any() | allowed[:, :, mask.keys :].any())


def test_sorted_anchors_keep_blocks_sparse(make_args, make_batch):
    args = make_args(anchor_slots=128, block_tokens=16)
    batch = make_batch(args, (1024,), tokens=1024)
    shuffled = torch.randperm(128)
    anchors = batch.anchors
    mixed = type(anchors)(anchors.position_BA[:, shuffled], anchors.keep_BA[:, shuffled])
    kept = [
        int(DraftMask(a, batch.document, 16).block_sparse().kv_num_blocks.sum())
        for a in (anchors, mixed)
    ]
    assert kept[0] < 0.8 * kept[1]


def test_visible_share_is_the_mean_of_the_dense_mask_over_used_queries():
    generator = torch.Generator().manual_seed(0)
    document_BS = torch.tensor([[0] * 11 + [1] * 9, [0] * 15 + [-1] * 5], dtype=torch.int32)
    position_BA = torch.randint(0, 15, (2, 3), generator=generator).sort(-1).values
    keep_BA = torch.tensor([[True, True, False], [True, True, True]])
    mask = DraftMask(Anchors(position_BA, keep_BA), document_BS, 4)
    used_BT = keep_BA.repeat_interleave(4, dim=1)
    assert mask.visible_share() == pytest.approx(float(mask.dense()[used_BT].double().mean()))
