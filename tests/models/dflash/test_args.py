"""Taps, mask token and decay: what the rules give and what they refuse."""

import math

import pytest

from titan_lowprec.models.dflash.args import published_gamma, resolve_mask_id, tap_layers

MASK_RULE = {
    "explicit": None,
    "draft_config": {},
    "tokenizer_mask_id": None,
    "tokenizer_size": 90,
    "vocab_size": 100,
    "eos_ids": (7, 8),
}


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 5, (1, 7, 13, 19, 25)),
        (36, 1, (18,)),
        (6, 3, (1, 2, 3)),
        (7, 3, (1, 2, 4)),  # 2.5 goes to the even layer, as in the published code
    ],
)
def test_taps_are_spread_as_published(layers, taps, expected):
    assert tap_layers(target_layers=layers, taps=taps) == expected


@pytest.mark.parametrize(
    ("layers", "taps", "reason"),
    [
        (4, 2, "distinct"),
        (6, 5, "distinct"),
        (2, 1, "after the final norm"),
        (1, 1, "after the final norm"),
        (36, 0, "at least 1"),
    ],
)
def test_rule_without_valid_taps_is_refused(layers, taps, reason):
    with pytest.raises(ValueError, match=reason):
        tap_layers(target_layers=layers, taps=taps)


@pytest.mark.parametrize(
    ("taps", "reason"),
    [((1, 1), "distinct"), ((), "at least one"), ((7,), "final norm"), ((8,), "0"), ((-1,), "0")],
)
def test_named_taps_are_checked(make_args, taps, reason):
    with pytest.raises(ValueError, match=reason):
        make_args(tap_layers=taps)


def test_mask_token_is_explicit_then_config_then_tokenizer_then_first_unused_row():
    steps = [
        ({"explicit": 3}, 3),
        ({"draft_config": {"dflash_config": {"mask_token_id": 4}}}, 4),
        ({"draft_config": {"mask_token_id": 5}}, 5),
        ({"tokenizer_mask_id": 6}, 6),
        ({}, 90),
    ]
    for number, (_, expected) in enumerate(steps):
        given = MASK_RULE.copy()
        for changes, _ in reversed(steps[number:]):
            given |= changes
        assert resolve_mask_id(**given) == expected
    assert resolve_mask_id(**MASK_RULE | {"explicit": 0, "tokenizer_mask_id": 6}) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"explicit": 100}, "must be in"),
        ({"explicit": -1}, "must be in"),
        ({"tokenizer_mask_id": 8}, "eos"),
        ({"draft_config": {"mask_token_id": 7}}, "eos"),
        ({"tokenizer_size": 100}, "no embedding row is unused"),
    ],
)
def test_mask_token_that_cannot_serve_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        resolve_mask_id(**MASK_RULE | changes)


def test_gamma_is_published_for_three_block_sizes_and_else_refused():
    assert [published_gamma(block_tokens=b) for b in (16, 10, 8)] == [7.0, 5.0, 4.0]
    with pytest.raises(ValueError, match="set gamma explicitly"):
        published_gamma(block_tokens=12)


@pytest.mark.parametrize("gamma", [None, 0.0, -1.0, math.nan, math.inf])
@pytest.mark.filterwarnings("ignore")
def test_missing_gamma_is_refused(make_args, gamma):
    # With run-time checks of types, None is refused by those.
    with pytest.raises(Exception, match="gamma"):
        make_args(gamma=gamma)


@pytest.mark.parametrize(
    "changes",
    [{"block_tokens": 1}, {"heads": 3}, {"head_dim": 7}, {"mask_id": 37}, {"anchor_slots": 0}],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(make_args, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        make_args(**changes)
