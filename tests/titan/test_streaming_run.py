"""The 1B recipe's data section, streamed from a Hugging Face dataset folder, trains and resumes."""

import pyarrow
import pyarrow.parquet
import pytest

from tests.titan.conftest import ROOT

pytestmark = pytest.mark.slow

CARD = """---
configs:
- config_name: sample-350BT
  data_files:
  - split: train
    path: sample/350BT/*.parquet
---
"""


@pytest.fixture
def fineweb(tmp_path):
    """A folder laid out like FineWeb-Edu, with three small shards."""
    folder = tmp_path / "fineweb-edu"
    (folder / "sample" / "350BT").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for shard in range(3):
        texts = [f"shard {shard} document {i} " * (10 + 3 * i) for i in range(20)]
        table = pyarrow.table({"text": texts, "id": [f"{shard}-{i}" for i in range(20)]})
        file = folder / "sample" / "350BT" / f"{shard:03}_00000.parquet"
        pyarrow.parquet.write_table(table, file)
    return folder


def test_streamed_hub_dataset_resumes_with_the_next_batch(train, fineweb):
    recipe = ROOT / "recipes" / "llama1b_mxfp8.toml"
    small = (
        "--model.flavor=tiny",
        "--training.global_batch_size=2",
        "--training.mixed_precision_param=float32",
        "--compile.no-enable",
        "--data.window_documents=8",
        f"--data.hf_name={fineweb}",
    )
    whole = train("stream-whole", *small, "--training.steps=6", recipe=recipe)
    assert whole.status == 0, whole.output
    for steps in (3, 6):
        broken = train("stream-broken", *small, f"--training.steps={steps}", recipe=recipe)
        assert broken.status == 0, broken.output
    for name in ("loss", "fingerprint", "valid_tokens_seen"):
        assert broken.column(name) == whole.column(name), name
    assert len(set(whole.column("fingerprint"))) == 6
