"""Streaming in windows: the same rows at every world size, resumed without tokenising again."""

import pytest

from titan_lowprec.data.dataset import Cursor, build_packed_dataset
from titan_lowprec.data.evaluation import validation_batches
from titan_lowprec.data.loader import PackedLoader
from titan_lowprec.data.shards import LocalFiles
from titan_lowprec.data.tokenize import TextTokenizer

LENGTHS = tuple(range(1, 24))


@pytest.fixture
def stream(make_spec):
    """Return a factory of streams in windows of 5 documents (23 documents: 5 windows)."""
    spec_options = {"streaming": True, "window_documents": 5, "cache_dir": ""}
    return lambda **overrides: build_packed_dataset(make_spec(LENGTHS, **spec_options | overrides))


def rows(dataset, count, *, world_size=1, state=None, **options):
    loaders = [
        PackedLoader(dataset, batch_rows=1, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
    found = [
        next(loader)[0]["input"][0].tolist()
        for _ in range(count // world_size)
        for loader in loaders
    ]
    for loader in loaders:
        loader.close()
    return found, loaders[0].state_dict()


def epoch_rows(dataset):
    return sum(dataset.rows_in(Cursor(window=window)) for window in range(5))


@pytest.mark.parametrize("packer", ["concat", "best_fit"])
def test_every_token_of_an_epoch_comes_once(stream, packer):
    loader = PackedLoader(stream(packer=packer, repeat=False), batch_rows=1, rank=0, world_size=1)
    seen = [
        token
        for inputs, _ in loader
        for token, document in zip(
            inputs["input"][0].tolist(), inputs["document_ids"][0].tolist(), strict=True
        )
        if document >= 0
    ]
    assert sorted(seen) == list(range(sum(LENGTHS)))
    assert loader.exhausted and loader.dropped_rows == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_do_not_depend_on_world_size(stream, world_size, workers):
    expected, _ = rows(stream(), 60)
    found, _ = rows(stream(), 60, world_size=world_size, num_workers=workers, prefetch=3)
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_within_a_window_at_its_end_and_after_a_wrap(stream, workers):
    dataset = stream()
    per_epoch = epoch_rows(dataset)
    first_window = dataset.rows_in(Cursor())
    expected, _ = rows(dataset, 2 * per_epoch + 10)
    found, state = [], None
    for count in (1, first_window - 1, 3, per_epoch, per_epoch + 7 - first_window):
        more, state = rows(stream(), count, state=state, num_workers=workers, prefetch=3)
        found += more
    assert found == expected[: len(found)]
    assert len(found) == 2 * per_epoch + 10
    assert state["epoch"] == 2
    assert all(isinstance(state[key], int) for key in ("epoch", "window", "rows_consumed"))


def test_windows_are_shuffled_anew_each_epoch(stream):
    dataset = stream(repeat=True)
    count = epoch_rows(dataset)
    both, _ = rows(dataset, 2 * count)
    assert both[:count] != both[count:]


def test_resume_does_not_tokenise_what_came_before(stream, monkeypatch):
    _, state = rows(stream(), epoch_rows(stream()) - 1)
    assert state["window"] == 4
    encoded = []
    encode = TextTokenizer.encode

    def counting(self, texts):
        encoded.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode", counting)
    rows(stream(), 1, state=state)
    assert [len(text.split()) for text in encoded] == [21, 22, 23]


def test_a_source_is_opened_once_an_epoch(stream, monkeypatch):
    starts = []
    documents = LocalFiles.documents

    def counting(self, start):
        starts.append(start)
        return documents(self, start)

    monkeypatch.setattr(LocalFiles, "documents", counting)
    dataset = stream()
    epoch = epoch_rows(dataset)
    assert starts == [0]
    rows(dataset, epoch + 1)
    assert starts == [0, 0, 0]


def test_nothing_is_read_before_the_first_row(make_spec, monkeypatch):
    def refuse(self, start):
        raise AssertionError("read")

    monkeypatch.setattr(LocalFiles, "documents", refuse)
    dataset = build_packed_dataset(make_spec(LENGTHS, streaming=True))
    assert dataset.rows_per_epoch is None


@pytest.mark.parametrize("repeat", [True, False])
def test_a_stream_that_the_rule_empties_is_refused(stream, repeat):
    dataset = stream(min_document_tokens=100, repeat=repeat)
    loader = PackedLoader(dataset, batch_rows=1, rank=0, world_size=1)
    with pytest.raises(ValueError, match="at least one document must have"):
        next(loader)


def test_windows_without_a_row_are_passed_over(stream):
    dataset = stream(min_document_tokens=12, long_document="split")
    assert dataset.rows_in(Cursor()) == 0
    found, state = rows(dataset, 90)
    assert state["epoch"] > 1
    assert {token for row in found for token in row} >= set(range(66, 276))


def test_statistics_cover_the_windows_seen(stream):
    dataset = stream(repeat=False)
    assert dataset.statistics.documents == 5
    assert len(list(PackedLoader(dataset, batch_rows=1, rank=0, world_size=1))) > 0
    assert dataset.statistics.documents == 23
    assert dataset.statistics.tokens == sum(LENGTHS)


def test_another_window_size_is_another_plan(stream):
    assert stream().plan != stream(window_documents=6).plan
    assert stream().plan == stream().plan


def test_validation_of_a_stream_can_be_limited(stream):
    batches = validation_batches(stream(), batch_rows=2, rank=0, world_size=1, max_batches=3)
    assert len(list(batches)) == 3
