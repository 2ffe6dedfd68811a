"""Anchors: candidates, uniform draws in fixed slots, and a state that resumes."""

import pytest
import torch

from titan_lowprec.models.dflash.anchors import AnchorSampler, anchor_candidates


def mask(text):
    return torch.tensor([[c == "1" for c in text]])


def test_candidate_needs_itself_and_its_successor_in_one_document():
    #                      tail: last two
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 3, -1, -1]])
    loss_mask = mask("1111011111")
    assert anchor_candidates(loss_mask, document).int().tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]]
    one = torch.zeros(1, 10, dtype=torch.int32)
    assert anchor_candidates(loss_mask, one).int().tolist() == [[1, 1, 1, 0, 0, 1, 1, 1, 1, 0]]


def test_draw_is_sorted_distinct_and_among_candidates():
    candidates = torch.rand(5, 200) < 0.4
    anchors = AnchorSampler(seed=3, slots=32).draw(
        candidates, first_row=0, total_rows=len(candidates)
    )
    assert bool(anchors.keep_BA.all())
    assert bool((anchors.position_BA.diff(dim=1) > 0).all())
    assert bool(candidates.gather(1, anchors.position_BA).all())


def test_short_row_keeps_its_shape_with_unused_slots_last():
    candidates = mask("0100100000").expand(2, -1).clone()
    candidates[1] = False
    anchors = AnchorSampler(seed=0, slots=4).draw(
        candidates, first_row=0, total_rows=len(candidates)
    )
    assert anchors.position_BA.tolist() == [[1, 4, 9, 9], [9, 9, 9, 9]]
    assert anchors.keep_BA.int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]


def test_draws_are_uniform():
    sampler = AnchorSampler(seed=1, slots=5)
    candidates = torch.ones(200, 20, dtype=torch.bool)
    hits = torch.zeros(20)
    for _ in range(10):
        position = sampler.draw(candidates, first_row=0, total_rows=len(candidates)).position_BA
        hits += torch.bincount(position.flatten(), minlength=20)
    # Each position is drawn 500 times on average, with a standard deviation of 19.4.
    assert float((hits - 500).abs().max()) < 5 * 19.4


def test_resumed_run_draws_what_it_would_have_drawn():
    candidates = torch.rand(3, 100) < 0.5
    whole = AnchorSampler(seed=11, slots=8)
    drawn = [
        whole.draw(candidates, first_row=0, total_rows=len(candidates)).position_BA
        for _ in range(5)
    ]
    first = AnchorSampler(seed=11, slots=8)
    for _ in range(2):
        first.draw(candidates, first_row=0, total_rows=len(candidates))
    resumed = AnchorSampler(seed=11, slots=8)
    resumed.load_state_dict(first.state_dict())
    for expected in drawn[2:]:
        assert torch.equal(
            resumed.draw(candidates, first_row=0, total_rows=len(candidates)).position_BA, expected
        )
    assert not torch.equal(drawn[0], drawn[2]), "a restarted generator would repeat the first draw"


def test_other_seed_or_slots_do_not_resume():
    state = AnchorSampler(seed=11, slots=8).state_dict()
    for seed, slots in ((12, 8), (11, 9)):
        with pytest.raises(ValueError, match="resume with the checkpoint's"):
            AnchorSampler(seed=seed, slots=slots).load_state_dict(state)


def test_row_draws_alike_on_any_rank_and_rows_differ():
    candidates = torch.ones(4, 300, dtype=torch.bool)
    whole = (
        AnchorSampler(seed=2, slots=16)
        .draw(candidates, first_row=0, total_rows=len(candidates))
        .position_BA
    )
    second = (
        AnchorSampler(seed=2, slots=16).draw(candidates[2:], first_row=2, total_rows=4).position_BA
    )
    assert torch.equal(whole[2:], second)
    assert len({tuple(row) for row in whole.tolist()}) == 4
    other = (
        AnchorSampler(seed=3, slots=16)
        .draw(candidates, first_row=0, total_rows=len(candidates))
        .position_BA
    )
    assert not torch.equal(whole, other)


def test_ranks_and_micro_batches_do_not_change_what_a_row_draws():
    candidates = torch.rand(8, 120) < 0.5
    whole = AnchorSampler(seed=5, slots=8).draw(candidates, first_row=0, total_rows=8).position_BA
    ranks = [AnchorSampler(seed=5, slots=8) for _ in range(2)]
    parts = [
        sampler.draw(candidates[4 * m + 2 * r :][:2], first_row=2 * r, total_rows=4).position_BA
        for m in range(2)
        for r, sampler in enumerate(ranks)
    ]
    assert torch.equal(whole, torch.cat(parts))
    with pytest.raises(ValueError, match="count the rows of every rank"):
        ranks[0].draw(candidates[:2], first_row=2, total_rows=2)
