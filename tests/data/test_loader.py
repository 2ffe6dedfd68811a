"""The stream of batches: order, world size, resume, end, workers."""

import pytest
import torch

from titan_lowprec.data.dataset import build_packed_dataset
from titan_lowprec.data.fingerprint import fingerprint_rows
from titan_lowprec.data.loader import PackedLoader

LENGTHS = (3, 5, 8, 2, 30, 6, 4, 4, 7, 1, 11, 9)
ROWS = 12
"""Rows of an epoch of LENGTHS under concat: 90 tokens in rows of 8."""


def rows_of(batch):
    inputs, labels = batch
    return [
        (tuple(tokens), tuple(row_labels))
        for tokens, row_labels in zip(inputs["input"].tolist(), labels.tolist(), strict=True)
    ]


def global_stream(dataset, steps, *, batch_rows, world_size, states=None, **options):
    """Return the rows of all ranks, step by step, rank after rank."""
    loaders = [
        PackedLoader(dataset, batch_rows=batch_rows, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    for loader in loaders:
        if states is not None:
            loader.load_state_dict(states)
    rows = [row for _ in range(steps) for loader in loaders for row in rows_of(next(loader))]
    assert len({str(loader.state_dict()) for loader in loaders}) == 1
    for loader in loaders:
        loader.close()
    return rows, loaders[0].state_dict()


def reference_rows(dataset, epochs):
    return [
        (tuple(row.tokens_T.tolist()), tuple(row.labels_T.tolist()))
        for epoch in range(epochs)
        for row in (dataset.row(epoch, index) for index in range(ROWS))
    ]


def test_batch_carries_inputs_of_fixed_shape(make_dataset):
    dataset = make_dataset(LENGTHS)
    assert dataset.rows_per_epoch == ROWS
    inputs, labels = next(PackedLoader(dataset, batch_rows=3, rank=0, world_size=1))
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()}
    assert shapes == {
        "input": ((3, 8), torch.int64),
        "positions": ((3, 8), torch.int64),
        "document_ids": ((3, 8), torch.int32),
        "cu_seqlens": ((3, 9), torch.int32),
        "block_index": ((3, 8), torch.int32),
    }
    assert labels.shape == (3, 8) and labels.dtype == torch.int64


@pytest.mark.parametrize("batch_rows, world_size", [(1, 1), (5, 1), (1, 2), (3, 2), (1, 3), (2, 3)])
def test_global_stream_does_not_depend_on_world_size(make_dataset, batch_rows, world_size):
    dataset = make_dataset(LENGTHS)
    steps = 30 // (batch_rows * world_size)
    rows, _ = global_stream(dataset, steps, batch_rows=batch_rows, world_size=world_size)
    assert rows == reference_rows(dataset, 3)[:30]


def test_order_differs_between_epochs_and_seeds_and_contents_do_not(make_dataset):
    dataset = make_dataset((8,) * 12)
    first, second = (
        [dataset.row(epoch, index).tokens_T[0].item() for index in range(12)] for epoch in (0, 1)
    )
    assert first != second
    assert sorted(first) == sorted(second)
    again = make_dataset((8,) * 12)
    assert [again.row(1, index).tokens_T[0].item() for index in range(12)] == second
    other = make_dataset((8,) * 12, seed=2)
    assert [other.row(0, index).tokens_T[0].item() for index in range(12)] != first


def test_documents_sorted_by_source_are_mixed_at_once(make_dataset):
    dataset = make_dataset((8,) * 64, packer="best_fit")
    sources = {dataset.row(0, index).tokens_T[0].item() // (8 * 16) for index in range(16)}
    assert sources == {0, 1, 2, 3}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_resume_once_twice_and_after_a_wrap(make_spec, packer, workers):
    spec = make_spec(LENGTHS, packer=packer)
    options = {"batch_rows": 2, "world_size": 1, "num_workers": workers, "prefetch": 4}
    unbroken, _ = global_stream(build_packed_dataset(spec), 18, **options)
    resumed, state = [], None
    for steps in (3, 2, 4, 9):
        rows, state = global_stream(build_packed_dataset(spec), steps, states=state, **options)
        resumed += rows
    assert resumed == unbroken
    assert set(state) == {"epoch", "window", "rows_consumed", "plan"}
    assert all(isinstance(state[key], int) for key in ("epoch", "window", "rows_consumed"))


def test_resume_at_another_world_size_continues_with_the_next_row(make_dataset):
    dataset = make_dataset(LENGTHS)
    rows, state = global_stream(dataset, 3, batch_rows=1, world_size=2)
    for world_size, steps in ((3, 4), (1, 6), (2, 3)):
        more, state = global_stream(
            dataset, steps, batch_rows=1, world_size=world_size, states=state
        )
        rows += more
    assert rows == reference_rows(dataset, 3)[:30]


@pytest.mark.parametrize("workers", [1, 2])
def test_state_reflects_batches_handed_out_not_prefetched(make_dataset, workers):
    loader = PackedLoader(
        make_dataset(LENGTHS), batch_rows=1, rank=0, world_size=1, num_workers=workers, prefetch=4
    )
    assert loader.state_dict()["rows_consumed"] == 0
    for consumed in range(1, 6):
        next(loader)
        assert loader.state_dict()["rows_consumed"] == consumed
    loader.close()


def test_loading_a_state_discards_prefetched_batches(make_dataset):
    dataset = make_dataset(LENGTHS)
    loader = PackedLoader(dataset, batch_rows=1, rank=0, world_size=1, num_workers=2, prefetch=4)
    start = loader.state_dict()
    first = [rows_of(next(loader)) for _ in range(5)]
    loader.load_state_dict(start)
    assert [rows_of(next(loader)) for _ in range(5)] == first
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_exhaustion_without_repeat_is_a_status(make_dataset, workers):
    loader = PackedLoader(
        make_dataset(LENGTHS, repeat=False),
        batch_rows=5,
        rank=0,
        world_size=1,
        num_workers=workers,
    )
    assert len(list(loader)) == 2
    assert loader.exhausted
    assert loader.dropped_rows == 2
    assert loader.state_dict()["rows_consumed"] == 10
    with pytest.raises(StopIteration):
        next(loader)
    loader.load_state_dict(loader.state_dict())
    assert not loader.exhausted
    assert list(loader) == []
    loader.close()


def test_every_rank_ends_at_the_same_step(make_dataset):
    dataset = make_dataset(LENGTHS, repeat=False)
    for rank in range(5):
        loader = PackedLoader(dataset, batch_rows=1, rank=rank, world_size=5)
        assert len(list(loader)) == 2
        assert loader.dropped_rows == 2


def test_an_epoch_that_ends_within_a_step_loses_no_row(make_dataset):
    dataset = make_dataset(LENGTHS)
    rows, state = global_stream(dataset, 2, batch_rows=5, world_size=2)
    assert rows == reference_rows(dataset, 2)[:20]
    assert (state["epoch"], state["rows_consumed"]) == (1, 8)


def test_a_step_longer_than_an_epoch_goes_round_again(make_dataset):
    dataset = make_dataset((8, 8))
    (inputs, _) = next(PackedLoader(dataset, batch_rows=5, rank=0, world_size=1))
    assert sorted(inputs["input"][:, 0].tolist()) in ([0, 0, 0, 8, 8], [0, 0, 8, 8, 8])


def test_state_of_another_plan_is_refused(make_dataset):
    state = PackedLoader(make_dataset(LENGTHS), batch_rows=1, rank=0, world_size=1).state_dict()
    changes = (
        {"seed": 2},
        {"packer": "best_fit"},
        {"seq_len": 16},
        {"max_documents": 7},
        {"long_document": "drop"},
        {"min_document_tokens": 2},
        {"add_eos": True},
    )
    for change in changes:
        loader = PackedLoader(make_dataset(LENGTHS, **change), batch_rows=1, rank=0, world_size=1)
        with pytest.raises(ValueError, match=r"the state belongs to plan .* restore text"):
            loader.load_state_dict(state)
    other_text = make_dataset((*LENGTHS, 4))
    with pytest.raises(ValueError, match="belongs to plan"):
        PackedLoader(other_text, batch_rows=1, rank=0, world_size=1).load_state_dict(state)


def test_plan_does_not_depend_on_where_and_when_files_were_written(make_spec, make_dataset):
    first = make_dataset(LENGTHS).plan
    assert make_dataset(LENGTHS, cache_dir=make_spec().cache_dir + "2").plan == first


def test_damaged_state_is_refused(make_dataset):
    loader = PackedLoader(make_dataset(LENGTHS), batch_rows=1, rank=0, world_size=1)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"rows_consumed must be within 0..12"):
        loader.load_state_dict(state | {"rows_consumed": 13})
    with pytest.raises(ValueError, match="a state must have"):
        loader.load_state_dict({"epoch": 0})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_rows": 0}, "batch_rows must be at least 1, got 0"),
        ({"rank": 2}, r"rank must be in 0..1 \(world_size=2\), got 2"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"prefetch": 0}, "prefetch must be at least 1"),
    ],
)
def test_impossible_options_are_refused(make_dataset, options, message):
    defaults = {"batch_rows": 1, "rank": 0, "world_size": 2}
    with pytest.raises(ValueError, match=message):
        PackedLoader(make_dataset(), **(defaults | options))


def test_an_error_in_a_worker_reaches_the_caller(make_dataset, monkeypatch):
    dataset = make_dataset(LENGTHS)

    def fail(reference):
        raise OSError("disk gone")

    monkeypatch.setattr(dataset, "read", fail)
    loader = PackedLoader(dataset, batch_rows=1, rank=0, world_size=1, num_workers=1)
    with pytest.raises(OSError, match="disk gone"):
        next(loader)
    loader.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works with a CUDA device")
def test_pinning_without_a_device_is_refused(make_dataset):
    with pytest.raises(ValueError, match="pin_memory needs a CUDA device"):
        PackedLoader(make_dataset(), batch_rows=1, rank=0, world_size=1, pin_memory=True)


@pytest.mark.gpu
def test_pinned_batches(make_dataset):
    loader = PackedLoader(
        make_dataset(), batch_rows=1, rank=0, world_size=1, num_workers=1, pin_memory=True
    )
    inputs, labels = next(loader)
    assert labels.is_pinned() and all(tensor.is_pinned() for tensor in inputs.values())
    loader.close()


def test_fingerprints_of_ranks_add_up_to_that_of_the_batch(make_dataset):
    dataset = make_dataset(LENGTHS)
    whole, labels = next(PackedLoader(dataset, batch_rows=6, rank=0, world_size=1))
    expected = fingerprint_rows(whole["input"], labels)
    for world_size in (1, 2, 3):
        parts = [
            next(PackedLoader(dataset, batch_rows=6 // world_size, rank=r, world_size=world_size))
            for r in range(world_size)
        ]
        total = sum(fingerprint_rows(inputs["input"], labels) for inputs, labels in parts)
        assert total % 2**64 == expected


def test_fingerprint_notices_each_kind_of_change():
    tokens = torch.arange(24).reshape(3, 8)
    labels = tokens + 1
    swapped_tokens = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    ignored = labels.clone()
    ignored[0, 0] = -100
    variants = [
        fingerprint_rows(tokens, labels),
        fingerprint_rows(swapped_tokens, labels),
        fingerprint_rows(tokens, ignored),
        fingerprint_rows(tokens[:2], labels[:2]),
        fingerprint_rows(tokens[[0, 1, 1]], labels[[0, 1, 1]]),
        fingerprint_rows(labels, tokens),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint_rows(tokens.flip(0), labels.flip(0)) == variants[0]
    assert all(0 <= value < 2**64 for value in variants)


def test_fingerprint_agrees_with_python_integers():
    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    tokens, labels = [5, 163840, 7], [163840, 7, -100]
    entries = [
        mix(mix((token + mix(place)) % 2**64) ^ (label % 2**64))
        for place, (token, label) in enumerate(zip(tokens, labels, strict=True), start=1)
    ]
    expected = mix(sum(entries) % 2**64)
    assert fingerprint_rows(torch.tensor([tokens]), torch.tensor([labels])) == expected
