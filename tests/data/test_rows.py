"""Rows: labels, positions and metadata follow the documents, whatever the ids say."""

from itertools import pairwise

import pytest
import torch

from titan_lowprec.data.dataset import build_packed_dataset
from titan_lowprec.data.rows import IGNORE_INDEX
from titan_lowprec.formats.token_blocks import check_cu_seqlens

BOS, EOS = 2001, 2002


def all_rows(dataset, epoch=0):
    return [dataset.row(epoch, index) for index in range(dataset.rows_per_epoch)]


def documents_of(row):
    """Return the row's documents as lists of ids, cut where cu_seqlens says."""
    edges = row.cu_seqlens_M1.tolist()
    parts = [row.tokens_T[a:b].tolist() for a, b in pairwise(edges)]
    return [part for part in parts if part]


def valid_labels(row):
    return int((row.labels_T != IGNORE_INDEX).sum())


def test_lengths_3_and_5_restart_positions_and_ignore_two_labels(make_dataset):
    row = make_dataset((3, 5)).row(0, 0)
    lengths = [len(document) for document in documents_of(row)]
    assert sorted(lengths) == [3, 5]
    first = lengths[0]
    assert row.positions_T.tolist() == [*range(first), *range(8 - first)]
    assert row.document_ids_T.tolist() == [0] * first + [1] * (8 - first)
    assert row.cu_seqlens_M1.tolist() == [0, first] + [8] * 7
    expected = [IGNORE_INDEX if t in (first - 1, 7) else row.tokens_T[t + 1] for t in range(8)]
    assert row.labels_T.tolist() == expected
    assert valid_labels(row) == (3 - 1) + (5 - 1)


@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_labels_count_the_transitions_within_documents(make_dataset, packer):
    dataset = make_dataset((3, 30, 8, 1, 9, 2, 5), packer=packer)
    for row in all_rows(dataset):
        documents = documents_of(row)
        assert valid_labels(row) == sum(len(document) - 1 for document in documents)
        labels = iter(row.labels_T.tolist())
        for document in documents:
            assert [next(labels) for _ in document] == [*document[1:], IGNORE_INDEX]
        assert all(label == IGNORE_INDEX for label in labels)


def test_best_fit_labels_add_up_over_the_corpus(make_dataset):
    lengths = (3, 8, 1, 2, 5, 7, 7)
    dataset = make_dataset(lengths, packer="best_fit")
    assert sum(map(valid_labels, all_rows(dataset))) == sum(length - 1 for length in lengths)


def test_tail_has_no_document(make_dataset):
    row = make_dataset((5,)).row(0, 0)
    assert row.tokens_T.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert row.labels_T.tolist() == [1, 2, 3, 4] + [IGNORE_INDEX] * 4
    assert row.document_ids_T.tolist() == [0] * 5 + [-1] * 3
    assert row.block_index_T.tolist() == [0] * 5 + [-1] * 3
    assert row.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert row.cu_seqlens_M1.tolist() == [0] + [5] * 8


def test_pieces_of_a_long_document_restart_positions(make_dataset):
    dataset = make_dataset((20,))
    rows = all_rows(dataset)
    assert sorted(row.tokens_T[0].item() for row in rows) == [0, 8, 16]
    for row in rows:
        assert row.positions_T.max() < 8
        assert row.positions_T[0] == 0


def test_scale_blocks_of_32_tokens_never_span_documents(make_dataset):
    row = make_dataset((70, 33, 25), seq_len=128).row(0, 0)
    expected, block = [], 0
    for document in documents_of(row):
        expected += [block + position // 32 for position in range(len(document))]
        block += -(-len(document) // 32)
    assert row.block_index_T.tolist() == expected
    assert block == 3 + 2 + 1


def test_dtypes_and_fixed_capacity(make_dataset):
    dataset = make_dataset((3, 5, 2, 2, 2, 2, 2, 2), max_documents=5)
    for row in all_rows(dataset):
        assert row.tokens_T.dtype == row.labels_T.dtype == row.positions_T.dtype == torch.int64
        assert row.document_ids_T.dtype == row.block_index_T.dtype == torch.int32
        assert row.cu_seqlens_M1.shape == (6,)
        check_cu_seqlens(row.cu_seqlens_M1, total_tokens=8)


def test_boundaries_come_from_the_data_with_eos_in_the_text(make_dataset):
    dataset = make_dataset(texts=["1 </s> 2", "</s> </s>", "<s> 3"], add_bos=True, add_eos=True)
    documents = [document for row in all_rows(dataset) for document in documents_of(row)]
    assert dataset.statistics.documents == 3
    interior = [token for document in documents for token in document[1:-1]]
    assert EOS not in interior and BOS not in interior
    assert sum(document.count(EOS) for document in documents) == 3


def test_a_corpus_of_one_id_keeps_its_documents(make_spec, tokenizer_factory, tmp_path):
    folder = tokenizer_factory(tmp_path / "shared", bos="</s>", eos="</s>")
    spec = make_spec(texts=["", "", ""], tokenizer_path=folder, add_bos=True, add_eos=True)
    row = build_packed_dataset(spec).row(0, 0)
    assert row.tokens_T.tolist() == [EOS] * 8
    assert row.cu_seqlens_M1.tolist() == [0, 2, 4] + [6] * 6
    assert row.document_ids_T.tolist() == [0, 0, 1, 1, 2, 2, -1, -1]
    assert valid_labels(row) == 3


def test_one_id_for_bos_and_eos(make_spec, tokenizer_factory, tmp_path):
    folder = tokenizer_factory(tmp_path / "shared", bos="</s>", eos="</s>")
    spec = make_spec((2, 2, 2), tokenizer_path=folder, add_bos=True, add_eos=True, seq_len=12)
    dataset = build_packed_dataset(spec)
    row = dataset.row(0, 0)
    documents = documents_of(row)
    assert len(documents) == 3
    assert all(d[0] == d[-1] == EOS and len(d) == 4 for d in documents)
    assert valid_labels(row) == 9


def test_ignored_row_has_no_label_and_no_document(make_dataset):
    row = make_dataset((3, 5)).ignored_row()
    assert valid_labels(row) == 0
    assert set(row.document_ids_T.tolist()) == {-1}
    assert row.cu_seqlens_M1.tolist() == [0] * 9


def test_row_out_of_range_is_refused(make_dataset):
    with pytest.raises(IndexError, match="a row must be below 1"):
        make_dataset((3, 5)).row(0, 1)


def test_vocabulary_smaller_than_the_tokenizer_is_refused(make_dataset):
    dataset = make_dataset((3, 5))
    assert dataset.vocab_size == 2003
    dataset.require_vocab(4096)
    with pytest.raises(ValueError, match=r"2003 ids, got 2000; raise"):
        dataset.require_vocab(2000)
