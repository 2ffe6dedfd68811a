"""Speculative decoding equals plain greedy decoding, whatever is drafted, and counts honestly."""

import pytest
import torch

from titan_lowprec.models.dflash.decode import (
    BlockDraft,
    TargetStep,
    first_divergence,
    greedy_decode,
    speculative_decode,
)
from titan_lowprec.models.dflash.model import DraftModel

V = 11


@pytest.fixture
def target():
    """A causal toy: logits are a random function of the last two tokens, features one-hot ids."""
    table = torch.randn(V, V, V)

    def step(tokens):
        before = torch.cat((tokens[:1], tokens[:-1]))
        return TargetStep(table[before, tokens], torch.nn.functional.one_hot(tokens, V).float())

    return step


class Planned:
    """Proposes greedy tokens except at planned places, and checks what it is given."""

    def __init__(self, greedy, rights, tokens=4):
        self.greedy, self.rights, self.tokens, self.calls = greedy, rights, tokens, 0

    def __call__(self, tokens, features):
        known = len(tokens) - 1
        assert torch.equal(features, torch.nn.functional.one_hot(tokens[:known], V).float())
        padded = torch.cat((self.greedy, torch.zeros(9, dtype=torch.int64)))
        proposal = padded[known + 1 : known + 1 + self.tokens].clone()
        right = self.rights[self.calls % len(self.rights)]
        proposal[right:] = (proposal[right:] + 1) % V
        self.calls += 1
        return proposal


@pytest.mark.parametrize("rights", [(0,), (4,), (2,), (0, 3, 1, 4)], ids=str)
def test_output_is_greedy_and_lengths_are_what_was_right(target, rights):
    prompt = torch.tensor([3, 1, 4])
    greedy = greedy_decode(target, prompt, max_new_tokens=40, eos_ids=())
    decoded = speculative_decode(
        target, Planned(greedy, rights), prompt, max_new_tokens=40, eos_ids=()
    )
    assert torch.equal(decoded.tokens_S, greedy)
    # The last blocks run past the greedy text, whose continuation the plan does not know.
    planned = [r + 1 for r in rights] * 40
    whole = len(decoded.lengths) - 1
    assert list(decoded.lengths[:whole]) == planned[:whole]
    assert sum(decoded.lengths) >= 39 > sum(decoded.lengths[:whole])


def test_statistics_of_lengths(target):
    prompt = torch.tensor([3, 1, 4])
    greedy = greedy_decode(target, prompt, max_new_tokens=60, eos_ids=())
    draft = Planned(greedy, (0, 3, 3))
    decoded = speculative_decode(target, draft, prompt, max_new_tokens=19, eos_ids=())
    assert decoded.lengths == (1, 4, 4, 1, 4, 4)
    assert decoded.acceptance_length == 3.0
    assert decoded.distribution() == {1: 2, 4: 4}
    assert len(decoded.tokens_S) == 3 + 19


@pytest.mark.parametrize("right", [0, 2, 4])
def test_eos_ends_both_at_the_same_token(target, right):
    prompt = torch.tensor([3, 1, 4])
    free = greedy_decode(target, prompt, max_new_tokens=40, eos_ids=())
    eos = int(free[9])
    greedy = greedy_decode(target, prompt, max_new_tokens=40, eos_ids=(eos,))
    decoded = speculative_decode(
        target, Planned(free, (right,)), prompt, max_new_tokens=40, eos_ids=(eos,)
    )
    assert torch.equal(decoded.tokens_S, greedy)
    assert int(greedy[-1]) == eos and len(prompt) + 1 + sum(decoded.lengths) == len(greedy)


@pytest.mark.parametrize("impl", ["reference", "flex_fp32_ieee"])
@pytest.mark.slow
def test_untrained_draft_model_leaves_the_output_greedy(make_args, make_tables, target, impl):
    args = make_args(vocab_size=V, model_dim=V, mask_id=10, tap_layers=(1,))
    model = DraftModel(args)
    model.init_weights(std=0.3)
    draft = BlockDraft(model, make_tables(args), impl=impl)
    prompt, options = torch.tensor([3, 1, 4]), {"max_new_tokens": 12, "eos_ids": ()}
    greedy = greedy_decode(target, prompt, **options)
    decoded = speculative_decode(target, draft, prompt, **options)
    assert torch.equal(decoded.tokens_S, greedy)
    assert first_divergence(target, greedy, decoded.tokens_S) is None


def test_drafting_computes_what_training_computed(make_args, make_batch, make_tables):
    args = make_args()
    batch, tables, model = make_batch(args, (30,), tokens=30), make_tables(args), DraftModel(args)
    model.init_weights(std=0.3)
    with torch.no_grad():
        logits = tables.logits(batch.hidden(model, tables)[0]).unflatten(0, (-1, args.block_tokens))
    draft = BlockDraft(model, tables, impl="reference")
    assert bool(batch.anchors.keep_BA.all())
    for j, a in enumerate(batch.anchors.position_BA[0].tolist()):
        proposal = draft(batch.tokens[0, : a + 1], batch.features[0, :a])
        assert torch.equal(proposal, logits[j, 1:].argmax(-1))


def test_other_head_than_in_training_is_seen_in_the_drafts(make_args, make_batch, make_tables):
    args = make_args()
    batch, model = make_batch(args, (30,), tokens=30), DraftModel(args)
    model.init_weights(std=0.3)
    tokens, features = batch.tokens[0, :20], batch.features[0, :19]
    one, other = (BlockDraft(model, make_tables(args), impl="reference") for _ in "ab")
    assert not torch.equal(one(tokens, features), other(tokens, features))


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_features_are_refused(make_args, make_batch, make_tables, shift):
    args = make_args()
    batch = make_batch(args, (30,), tokens=30)
    draft = BlockDraft(DraftModel(args), make_tables(args), impl="reference")
    with pytest.raises(ValueError, match="must not be shifted"):
        draft(batch.tokens[0, :20], batch.features[0, : 19 + shift])


def test_first_divergence_tells_place_and_margin(target):
    greedy = greedy_decode(target, torch.tensor([3, 1, 4]), max_new_tokens=9, eos_ids=())
    other = greedy.clone()
    other[7] = (other[7] + 1) % V
    other[9] = (other[9] + 1) % V
    found = first_divergence(target, greedy, other)
    logits = target(greedy[:7]).logits_SV[-1]
    assert found is not None and found.index == 7
    assert found.margin == pytest.approx(float(logits.max() - logits[other[7]]))
    with pytest.raises(ValueError, match="same limit"):
        first_divergence(target, greedy, greedy[:-1])


@pytest.mark.parametrize(("prompt", "tokens"), [([], 4), ([1], 0)])
def test_nothing_to_decode_is_refused(target, prompt, tokens):
    with pytest.raises(ValueError, match="at least 1"):
        speculative_decode(
            target,
            Planned(torch.zeros(1), (0,)),
            torch.tensor(prompt, dtype=torch.int64),
            max_new_tokens=tokens,
            eos_ids=(),
        )
