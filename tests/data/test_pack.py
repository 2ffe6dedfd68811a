"""Packers: every kept token lands in one row, and the statistics say what was not kept."""

from itertools import pairwise

import numpy as np
import pytest

from titan_lowprec.data.order import EpochOrder
from titan_lowprec.data.pack import PackingRule, pack_documents

LONG = 10


def rule(packer, *, row_tokens=LONG, max_documents=64, long_document="split", least=1):
    return PackingRule(
        row_tokens=row_tokens,
        max_documents=max_documents,
        packer=packer,
        long_document=long_document,
        min_document_tokens=least,
    )


def pack(lengths, packing_rule, *, seed=0, epoch=0):
    order = EpochOrder(seed, epoch, 0)
    return pack_documents(np.array(lengths, dtype=np.int64), rule=packing_rule, order=order)


def rows_of(index):
    """Return each row's pieces as (document, start, length)."""
    pieces = list(
        zip(index.document_P.tolist(), index.start_P.tolist(), index.length_P.tolist(), strict=True)
    )
    edges = index.first_piece_R1.tolist()
    return [pieces[begin:end] for begin, end in pairwise(edges)]


def tokens_of(index):
    return sorted(
        (document, start + offset)
        for row in rows_of(index)
        for document, start, length in row
        for offset in range(length)
    )


def random_lengths(count=400):
    return np.random.default_rng(0).geometric(0.15, size=count)


@pytest.mark.parametrize("max_documents", [64, 2])
@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_every_token_lands_in_exactly_one_row(packer, max_documents):
    lengths = random_lengths()
    index = pack(lengths, rule(packer, max_documents=max_documents))
    expected = [(m, t) for m, length in enumerate(lengths) for t in range(length)]
    assert tokens_of(index) == expected
    assert all(0 < sum(piece[2] for piece in row) <= LONG for row in rows_of(index))
    assert all(1 <= len(row) <= max_documents for row in rows_of(index))
    statistics = index.statistics
    assert statistics.packed_tokens == statistics.tokens == lengths.sum()
    assert statistics.padding_tokens == index.rows * LONG - lengths.sum()
    assert statistics.most_documents <= max_documents


def test_concat_fills_all_rows_but_one():
    index = pack([7, 7, 7, 7], rule("concat"))
    fills = sorted(sum(piece[2] for piece in row) for row in rows_of(index))
    assert fills == [8, 10, 10]
    assert index.statistics.cut_documents == 2
    assert index.statistics.cut_that_fit_documents == 2
    assert index.statistics.padding_tokens == 2


def test_best_fit_cuts_no_document_that_fits():
    lengths = random_lengths()
    index = pack(lengths, rule("best_fit"))
    assert index.statistics.cut_that_fit_documents == 0
    assert index.statistics.cut_documents == (lengths > LONG).sum()
    assert index.statistics.fill > 0.97
    assert pack(lengths, rule("concat")).statistics.cut_that_fit_documents > 50


def test_best_fit_takes_the_fullest_row_with_room():
    index = pack([7, 6, 3, 4], rule("best_fit"))
    contents = sorted(sorted(piece[0] for piece in row) for row in rows_of(index))
    assert contents == [[0, 2], [1, 3]]


def test_best_fit_splits_25_tokens_into_10_10_5():
    index = pack([25], rule("best_fit"))
    assert sorted(row for row in rows_of(index)) == [[(0, 0, 10)], [(0, 10, 10)], [(0, 20, 5)]]


@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_truncate_keeps_a_rows_worth_and_counts_the_rest(packer):
    index = pack([25, 4], rule(packer, long_document="truncate"))
    expected = [(0, t) for t in range(10)] + [(1, t) for t in range(4)]
    assert tokens_of(index) == expected
    assert index.statistics.truncated_tokens == 15
    assert index.statistics.long_documents == 1
    assert index.statistics.dropped_tokens == 0


@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_drop_counts_long_and_short_documents_apart(packer):
    index = pack([25, 4, 1, 11, 10], rule(packer, long_document="drop", least=2))
    assert {document for document, _ in tokens_of(index)} == {1, 4}
    statistics = index.statistics
    assert statistics.dropped_long_documents == 2
    assert statistics.dropped_short_documents == 1
    assert statistics.dropped_tokens == 25 + 11 + 1
    assert statistics.packed_tokens == 14


@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_a_row_at_capacity_is_closed_with_padding(packer):
    index = pack([2] * 10, rule(packer, max_documents=3))
    assert sorted(len(row) for row in rows_of(index)) == [1, 3, 3, 3]
    assert index.statistics.capacity_closed_rows == 3
    assert index.statistics.padding_tokens == 3 * 4 + 8
    assert index.statistics.most_documents == 3


@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_no_documents_give_no_rows(packer):
    for lengths in ([], [0, 0], [1]):
        index = pack(lengths, rule(packer, least=2))
        assert index.rows == 0
        assert index.statistics.fill == 0


@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_rows_and_documents_are_shuffled(packer):
    lengths = [LONG] * 50
    index = pack(lengths, rule(packer))
    order = index.document_P.tolist()
    assert order != sorted(order)
    assert pack(lengths, rule(packer), epoch=1).document_P.tolist() != order
    assert pack(lengths, rule(packer), seed=1).document_P.tolist() != order
    assert pack(lengths, rule(packer)).document_P.tolist() == order


def test_statistics_of_two_windows_add_up():
    first = pack([25, 4], rule("concat")).statistics
    second = pack([2, 2, 2], rule("concat")).statistics
    joined = first + second
    assert joined.tokens == 35
    assert joined.rows == first.rows + second.rows
    assert joined.row_tokens == LONG
    assert joined.most_documents == 3
    assert "5 documents, 35 tokens" in joined.describe()


def philox_4x64_10(counter, key):
    """Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", in Python integers."""
    mask = 2**64 - 1
    key = list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 2**64)
        counter = (high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0)
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_permutation_sorts_philox_keyed_by_seed_and_epoch():
    seed, epoch, window = 2**63 + 5, 3, 7
    for stream, permutation in ((0, EpochOrder.documents), (1, EpochOrder.rows)):
        draws = [
            draw
            for block in range(1, 4)
            for draw in philox_4x64_10((block, 0, window, stream), (seed, epoch))
        ]
        expected = sorted(range(12), key=draws.__getitem__)
        assert permutation(EpochOrder(seed, epoch, window), 12).tolist() == expected


def test_seed_epoch_window_and_stream_each_give_another_permutation():
    orders = [EpochOrder(0, 0, 0), EpochOrder(1, 0, 0), EpochOrder(0, 1, 0), EpochOrder(0, 0, 1)]
    permutations = [tuple(order.documents(50)) for order in orders]
    permutations.append(tuple(EpochOrder(0, 0, 0).rows(50)))
    assert len(set(permutations)) == 5
    assert all(sorted(permutation) == list(range(50)) for permutation in permutations)
