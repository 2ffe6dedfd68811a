"""Speculative decoding equals plain greedy decoding, whatever is drafted, and counts honestly."""

import pytest
import torch

from titan_lowprec.models.dflash.block_draft import BlockDraft
from titan_lowprec.models.dflash.decode import (
    TargetStep,
    first_divergence,
    greedy_decode,
    speculative_decode,
)
from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.testing.decoding import Recomputing

V = 11


@pytest.fixture
def step():
    """A causal toy: logits are a random function of the last two tokens, features one-hot ids."""
    table = torch.randn(V, V, V)

    def step(tokens):
        before = torch.cat((tokens[:1], tokens[:-1]))
        return TargetStep(table[before, tokens], torch.nn.functional.one_hot(tokens, V).float())

    return step


@pytest.fixture
def target(step):
    return Recomputing(step)


class Planned:
    """Proposes greedy tokens except at planned places, and checks what it is given."""

    def __init__(self, greedy, rights, tokens=4):
        self.greedy, self.rights, self.tokens, self.calls = greedy, rights, tokens, 0
        self.features = torch.empty(0, V)

    def reset(self):
        self.calls, self.features = 0, self.features[:0]

    def propose(self, tokens, features):
        known = len(tokens) - 1
        self.features = torch.cat((self.features, features))
        assert torch.equal(self.features, torch.nn.functional.one_hot(tokens[:known], V).float()), (
            "every token's features once, those of rejected ones never"
        )
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
    assert target.calls == 60 + 1 + 6, "one for the prompt and each verification"
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


def test_untrained_draft_model_leaves_the_output_greedy(make_args, make_tables, step, target):
    args = make_args(vocab_size=V, model_dim=V, mask_id=10, tap_layers=(1,))
    model = DraftModel(args)
    model.init_weights(std=0.3)
    draft = BlockDraft(model, make_tables(args), capacity=20)
    prompt, options = torch.tensor([3, 1, 4]), {"max_new_tokens": 12, "eos_ids": ()}
    greedy = greedy_decode(target, prompt, **options)
    for _ in range(2):
        decoded = speculative_decode(target, draft, prompt, **options)
        assert torch.equal(decoded.tokens_S, greedy)
    assert first_divergence(logits_of(step), greedy, decoded.tokens_S) is None


def logits_of(step):
    return lambda tokens: step(tokens).logits_SV


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_drafting_computes_what_training_computed(make_args, make_batch, make_tables, kv_heads):
    args = make_args(kv_heads=kv_heads)
    batch, tables, model = make_batch(args, (30,), tokens=30), make_tables(args), DraftModel(args)
    model.init_weights(std=0.3)
    with torch.no_grad():
        logits = tables.logits(batch.hidden(model, tables)[0]).unflatten(0, (-1, args.block_tokens))
    kept = BlockDraft(model, tables, capacity=30 + args.block_tokens)
    assert bool(batch.anchors.keep_BA.all())
    seen = 0
    for j, a in enumerate(batch.anchors.position_BA[0].tolist()):
        # one draft sees the context piece by piece, the other all at once
        proposal = kept.propose(batch.tokens[0, : a + 1], batch.features[0, seen:a])
        fresh = BlockDraft(model, tables, capacity=a + args.block_tokens)
        whole = fresh.propose(batch.tokens[0, : a + 1], batch.features[0, :a])
        assert torch.equal(proposal, logits[j, 1:].argmax(-1))
        assert torch.equal(proposal, whole)
        seen = a


def test_other_head_than_in_training_is_seen_in_the_drafts(make_args, make_batch, make_tables):
    args = make_args()
    batch, model = make_batch(args, (30,), tokens=30), DraftModel(args)
    model.init_weights(std=0.3)
    tokens, features = batch.tokens[0, :20], batch.features[0, :19]
    one, other = (BlockDraft(model, make_tables(args), capacity=30) for _ in "ab")
    assert not torch.equal(one.propose(tokens, features), other.propose(tokens, features))


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_features_are_refused(make_args, make_batch, make_tables, shift):
    args = make_args()
    batch = make_batch(args, (30,), tokens=30)
    draft = BlockDraft(DraftModel(args), make_tables(args), capacity=30)
    with pytest.raises(ValueError, match="must not be shifted"):
        draft.propose(batch.tokens[0, :20], batch.features[0, : 19 + shift])
    draft.propose(batch.tokens[0, :20], batch.features[0, :19])
    with pytest.raises(ValueError, match="must not be shifted"):
        draft.propose(batch.tokens[0, :22], batch.features[0, 19 : 21 + shift])


def test_draft_without_room_is_refused(make_args, make_batch, make_tables):
    args = make_args()
    batch = make_batch(args, (30,), tokens=30)
    draft = BlockDraft(DraftModel(args), make_tables(args), capacity=23)
    with pytest.raises(ValueError, match="at most 23 tokens, got 19 and 5"):
        draft.propose(batch.tokens[0, :20], batch.features[0, :19])


def test_first_divergence_tells_place_and_margin(step, target):
    greedy = greedy_decode(target, torch.tensor([3, 1, 4]), max_new_tokens=9, eos_ids=())
    other = greedy.clone()
    other[7] = (other[7] + 1) % V
    other[9] = (other[9] + 1) % V
    found = first_divergence(logits_of(step), greedy, other)
    logits = step(greedy[:7]).logits_SV[-1]
    assert found is not None and found.index == 7
    assert found.margin == pytest.approx(float(logits.max() - logits[other[7]]))
    with pytest.raises(ValueError, match="same limit"):
        first_divergence(logits_of(step), greedy, greedy[:-1])


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
