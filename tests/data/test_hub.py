"""Hugging Face data sets, from a local folder laid out as FineWeb-Edu's repository is."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import disable_progress_bars

from titan_lowprec.data.dataset import build_packed_dataset
from titan_lowprec.data.loader import PackedLoader

SHARDS = 7
DOCUMENTS = 70

disable_progress_bars()


@pytest.fixture
def fineweb(tmp_path, monkeypatch):
    """Return a folder with 7 parquet shards under the configuration sample-10BT."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "fineweb-edu"
    (folder / "sample" / "10BT").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n"
        "  - split: train\n    path: sample/10BT/*\n---\n"
    )
    for shard in range(SHARDS):
        numbers = range(shard, DOCUMENTS, SHARDS)
        table = pa.table(
            {
                "text": [
                    " ".join(str(20 * number + word) for word in range(9)) for number in numbers
                ],
                "id": [f"<urn:{number}>" for number in numbers],
                "score": [3.5 for _ in numbers],
            }
        )
        pq.write_table(table, folder / "sample" / "10BT" / f"{shard:03}_00000.parquet")
    return folder


@pytest.fixture
def hub_dataset(fineweb, make_spec):
    """Return a factory of data sets over the folder."""

    def make(**overrides):
        options = {
            "source": "hf",
            "paths": (),
            "hf_name": str(fineweb),
            "hf_config": "sample-10BT",
            "window_documents": 16,
            "packer": "best_fit",
            "seq_len": 32,
            "repeat": False,
        }
        return build_packed_dataset(make_spec(**(options | overrides)))

    return make


def first_tokens(dataset, world_size):
    """Return the first token of every document that any rank receives."""
    found = []
    for rank in range(world_size):
        loader = PackedLoader(dataset, batch_rows=1, rank=rank, world_size=world_size)
        for inputs, _ in loader:
            edges = sorted(set(inputs["cu_seqlens"][0].tolist()))
            found += inputs["input"][0, edges[:-1]].tolist()
    return sorted(found)


@pytest.mark.parametrize("streaming", [True, False])
def test_three_ranks_read_every_document_of_seven_shards_once(hub_dataset, streaming):
    # 16-document windows of 6 rows each, a last one of 2 rows; and one window of 24 rows.
    dataset = hub_dataset(streaming=streaming)
    assert dataset.rows_per_epoch == (None if streaming else 24)
    found = first_tokens(dataset, world_size=2 if streaming else 3)
    assert found == [20 * number for number in range(DOCUMENTS)]


@pytest.mark.parametrize("streaming", [True, False])
def test_resume_twice_and_after_a_wrap(hub_dataset, streaming):
    def read(steps, state=None):
        loader = PackedLoader(
            hub_dataset(streaming=streaming, repeat=True), batch_rows=2, rank=0, world_size=1
        )
        if state:
            loader.load_state_dict(state)
        rows = [next(loader)[0]["input"].tolist() for _ in range(steps)]
        return rows, loader.state_dict()

    unbroken, _ = read(20)
    resumed, state = [], None
    for steps in (4, 3, 8, 5):
        rows, state = read(steps, state)
        resumed += rows
    assert resumed == unbroken
    assert state["epoch"] == 1


def test_streaming_and_cached_plans_differ(hub_dataset):
    assert hub_dataset(streaming=True).plan != hub_dataset(streaming=False).plan


@pytest.mark.parametrize("streaming", [True, False])
def test_missing_column_names_the_columns_found(hub_dataset, streaming):
    with pytest.raises(ValueError, match=r"'body', got columns \['id', 'score', 'text'\]"):
        hub_dataset(streaming=streaming, text_column="body")


@pytest.mark.parametrize("streaming", [True, False])
def test_missing_configuration_and_split_are_named(hub_dataset, streaming):
    with pytest.raises(ValueError, match=r"sample-10BT.*set hf_config and hf_split"):
        hub_dataset(streaming=streaming, hf_config="sample-1T")
    with pytest.raises(ValueError, match=r"set hf_config and hf_split"):
        hub_dataset(streaming=streaming, hf_split="test")


@pytest.mark.parametrize("streaming", [True, False])
def test_unreachable_data_set_says_what_to_do(hub_dataset, streaming, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError,
        match=r'hf download --repo-type dataset nobody/nothing`, or .*source="local"',
    ):
        hub_dataset(streaming=streaming, hf_name="nobody/nothing")
