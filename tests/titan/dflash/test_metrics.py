"""FLOPs against PyTorch's own counter, and figures of drafts as scalars."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titan_lowprec.titan.dflash.flops import DraftWork, draft_step_flops
from titan_lowprec.titan.dflash.metrics import dashboard_scalars
from titan_lowprec.titan.dflash.model import TitanDraft


@pytest.mark.slow
def test_flops_of_the_draft_are_what_pytorch_counts(parse, resolve):
    args = resolve(parse())
    draft, model = args.draft, TitanDraft(args)
    B, S, T = 2, 48, draft.anchor_slots * draft.block_tokens
    position = torch.arange(S).expand(B, -1)
    with FlopCounterMode(display=False) as counter:
        out = model(
            torch.randn(B, S, draft.feature_dim),
            torch.randn(B, T, draft.model_dim),
            context_position_BS=position,
            block_position_BT=position[:, :1].expand(-1, T),
            mask=torch.ones(B, T, S + T, dtype=torch.bool),
            impl="reference",
        )
        out.sum().backward()
    # every key is seen here: as many pairs per token of context as give that
    work = DraftWork(
        tokens=B * S,
        attention_pairs=B * S * (S + T - draft.block_tokens),
        anchors=B * draft.anchor_slots,
        target_parameters=0,
        target_attention=0,
    )
    head = 4 * draft.vocab_size * draft.model_dim * B * T
    expected = draft_step_flops(draft, work) - head
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)


def test_target_and_head_cost_what_frozen_weights_cost(parse, resolve):
    draft = resolve(parse()).draft
    nothing = DraftWork(
        tokens=100, attention_pairs=0, anchors=0, target_parameters=0, target_attention=0
    )
    target = DraftWork(
        tokens=100, attention_pairs=7, anchors=0, target_parameters=1000, target_attention=3
    )
    more = draft_step_flops(draft, target) - draft_step_flops(draft, nothing)
    assert more == 2 * 1000 * 100 + 4 * 3 * 7


def test_dashboard_has_a_scalar_for_each_slot_with_labels():
    figures = {"anchors": 8, "acceptance_strict": 2.5, "slot_accuracy": [0.5, None, 0.25]}
    assert dashboard_scalars(figures, "draft") == {
        "draft/anchors": 8,
        "draft/acceptance_strict": 2.5,
        "draft/accuracy_slot_1": 0.5,
        "draft/accuracy_slot_3": 0.25,
    }
