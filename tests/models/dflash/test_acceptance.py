"""Acceptance lengths: three conventions on blocks small enough to count by hand."""

import math

import pytest
import torch

from titan_lowprec.models.dflash.acceptance import correct_drafts, count_acceptance


def blocks(*lines):
    """One row from strings: ``1`` right, ``0`` wrong, ``-`` does not count; slot 0 never does."""
    correct = torch.tensor([[[c == "1" for c in line] for line in lines]])
    valid = torch.tensor([[[c in "01" for c in line] for line in lines]])
    return correct, valid


@pytest.mark.parametrize(
    ("line", "strict", "pass_through"),
    [
        ("-1111", 5, 5),
        ("-1101", 3, 3),
        ("-0111", 1, 1),
        ("-1-11", 2, 4),
        ("-1-01", 2, 2),
        ("--111", 1, 4),
        ("-11--", 3, 3),
    ],
)
def test_lengths_of_single_blocks(line, strict, pass_through):
    counts = count_acceptance(*blocks(line))
    assert (counts.strict(), counts.pass_through()) == (strict, pass_through)


@pytest.mark.parametrize("line", ["-1-11", "--111", "-1-01", "-110-"])
def test_guesses_where_nothing_counts_do_not_matter(line):
    correct, valid = blocks(line)
    plain, guessed = (count_acceptance(c, valid) for c in (correct, correct | ~valid))
    assert plain.strict() == guessed.strict()
    assert plain.pass_through() == guessed.pass_through()
    assert torch.equal(plain.correct_P, guessed.correct_P)


def test_unused_slots_are_no_blocks():
    counts = count_acceptance(*blocks("-11", "---"))
    assert int(counts.blocks) == 1 and counts.strict() == 3


def test_pooled_understates_when_slots_fail_together():
    # Two blocks in two: all right or all wrong. Real lengths 4 and 1; pooled 1 + 1/2 + 1/4 + 1/8.
    counts = count_acceptance(*blocks("-111", "-000"))
    assert counts.strict() == counts.pass_through() == 2.5
    assert counts.pooled() == 1.875


def test_accuracy_is_not_an_acceptance_length():
    counts = count_acceptance(*blocks("-0111", "-0111"))
    accuracy = counts.correct_P.sum() / counts.valid_P.sum()
    assert float(accuracy) == 0.75 and counts.strict() == 1.0


def test_counts_of_micro_batches_add_up():
    lines = ("-1101", "-1-11", "-0111", "----1")
    parts = [count_acceptance(*blocks(line)) for line in lines]
    whole = count_acceptance(*blocks(*lines))
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert (total.strict(), total.pass_through()) == (whole.strict(), whole.pass_through())
    assert total.pooled() == whole.pooled()


def test_no_blocks_have_no_length():
    counts = count_acceptance(*blocks("---"))
    assert all(math.isnan(x) for x in (counts.strict(), counts.pass_through(), counts.pooled()))


@pytest.mark.parametrize("chunk_rows", [1, 13, 1000])
def test_correct_drafts_are_the_likeliest_tokens(make_args, make_batch, make_tables, chunk_rows):
    args = make_args()
    batch = make_batch(args, (30,), (20, 5), tokens=30)
    tables = make_tables(args)
    # Head rows of norm 1: a hidden state along a row makes that token the likeliest.
    tables.head_VE.div_(tables.head_VE.norm(dim=1, keepdim=True))
    answer = batch.blocks.label_BT.clamp(min=0)
    wrong = torch.rand(answer.shape) < 0.5
    hidden = tables.head_VE[torch.where(wrong, (answer + 1) % 36, answer)]
    correct = correct_drafts(hidden, batch.blocks, tables, chunk_rows=chunk_rows)
    valid = batch.blocks.valid_BAP
    assert torch.equal(correct & valid, ~wrong.view(valid.shape) & valid)
