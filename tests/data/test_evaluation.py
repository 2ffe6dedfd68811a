"""Validation: the same batches every round, equally many on each rank."""

import math

import pytest

from titan_lowprec.data.dataset import build_packed_dataset
from titan_lowprec.data.evaluation import unigram_entropy, validation_batches
from titan_lowprec.data.rows import IGNORE_INDEX
from titan_lowprec.data.spec import DataSpec

LENGTHS = (3, 5, 8, 2, 30, 6, 4, 4, 7, 1, 11, 9)
ROWS = 12


def labels_of(batches):
    return [label for _, labels in batches for label in labels.flatten().tolist()]


@pytest.mark.parametrize("batch_rows, world_size", [(1, 1), (5, 1), (1, 5), (2, 4), (8, 3)])
def test_ranks_have_equally_many_batches_and_every_label_once(make_dataset, batch_rows, world_size):
    dataset = make_dataset(LENGTHS)
    ranks = [
        list(validation_batches(dataset, batch_rows=batch_rows, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {-(-ROWS // (batch_rows * world_size))}
    shapes = {labels.shape for batches in ranks for _, labels in batches}
    assert shapes == {(batch_rows, 8)}
    found = [label for batches in ranks for label in labels_of(batches)]
    expected = [label for row in range(ROWS) for label in dataset.row(0, row).labels_T.tolist()]

    def valid(labels):
        return sorted(label for label in labels if label != IGNORE_INDEX)

    assert valid(found) == valid(expected)


def test_rounds_are_equal(make_dataset):
    dataset = make_dataset(LENGTHS)
    first, second = (
        labels_of(validation_batches(dataset, batch_rows=2, rank=1, world_size=2)) for _ in range(2)
    )
    assert first == second


def test_a_limit_takes_the_same_first_batches(make_dataset):
    dataset = make_dataset(LENGTHS)
    options = {"batch_rows": 2, "rank": 0, "world_size": 1}
    limited = list(validation_batches(dataset, max_batches=2, **options))
    assert len(limited) == 2
    assert labels_of(limited) == labels_of(validation_batches(dataset, **options))[: 2 * 2 * 8]


def test_padded_rows_have_no_document(make_dataset):
    dataset = make_dataset((3, 5))
    ((inputs, labels),) = validation_batches(dataset, batch_rows=2, rank=0, world_size=1)
    assert set(labels[1].tolist()) == {IGNORE_INDEX}
    assert set(inputs["document_ids"][1].tolist()) == {-1}
    assert set(inputs["cu_seqlens"][1].tolist()) == {0}


def test_entropy_of_equally_frequent_labels_is_the_log_of_their_number(make_dataset):
    assert unigram_entropy(make_dataset((5,))) == pytest.approx(math.log(4))
    assert unigram_entropy(make_dataset(texts=["9 1 1 1 2"])) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    )
    assert unigram_entropy(make_dataset((1,))) == 0


def test_entropy_of_the_bundled_validation_text(tmp_path):
    spec = DataSpec(
        source="local",
        paths=("bundled:validation",),
        tokenizer_path="bundled:tokenizer",
        seq_len=512,
        max_documents=16,
        packer="best_fit",
        long_document="split",
        seed=0,
        repeat=False,
        cache_dir=str(tmp_path),
    )
    assert unigram_entropy(build_packed_dataset(spec)) == pytest.approx(6.32, abs=0.01)
