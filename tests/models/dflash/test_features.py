"""Stored features: what is refused, what survives an interruption, and how they are read back."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from titan_lowprec.models.dflash.blocks import IGNORE_INDEX
from titan_lowprec.models.dflash.feature_loader import FeatureLoader
from titan_lowprec.models.dflash.feature_writer import (
    FeatureWriter,
    finish_index,
    specforge_records,
)
from titan_lowprec.models.dflash.features import (
    FeatureIdentity,
    FeatureReader,
    FeatureRecord,
    read_index,
)

IDENTITY = FeatureIdentity(
    target="llama3 tiny 0123",
    tap_layers=(1, 3),
    model_dim=3,
    vocab_size=50,
    dtype="bfloat16",
    tokenizer_sha256="ab",
    tokenizer_entries=49,
    eos_ids=(1,),
)


def record(tokens, *, documents=(None,), learned=True, scale=1.0):
    """Feature ``[s, o]`` is a one-hot of the token's id, so that a shift cannot hide."""
    lengths = [tokens if n is None else n for n in documents]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ids = torch.randint(6, (tokens,))
    return FeatureRecord(
        input_ids_S=ids,
        loss_mask_S=torch.full((tokens,), learned),
        document_S=document.int(),
        features_SO=(scale * torch.eye(6)[ids]).bfloat16(),
    )


def write(folder, records, *, per_shard=2, rank=0, source="s", identity=IDENTITY, finish=True):
    writer = FeatureWriter(folder, identity, source=source, rank=rank, per_shard=per_shard)
    for one in records[writer.batches :]:
        writer.add_batch([one])
    writer.close()
    return finish_index(folder, identity, ranks=1) if finish else None


def same(a, b):
    return all(
        torch.equal(x, y)
        for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True)
    )


def test_records_come_back_bit_for_bit(tmp_path):
    records = [record(n, documents=(2, n - 2)) for n in (5, 9, 4)]
    index = write(tmp_path, records)
    reader = FeatureReader(tmp_path)
    assert [same(reader.record(i), r) for i, r in enumerate(records)] == [True] * 3
    assert (index.records, index.tokens, index.longest, index.max_documents) == (3, 18, 9, 2)
    # two documents of n tokens in all have n - 2 tokens with a successor
    assert index.candidates == 3 + 7 + 2
    assert reader.index == index


def test_interrupted_writing_continues_after_the_last_complete_file(tmp_path):
    records = [record(4) for _ in range(7)]
    writer = FeatureWriter(tmp_path, IDENTITY, source="s", rank=0, per_shard=2)
    for one in records[:5]:
        writer.add_batch([one])
    del writer  # the fifth was not in a file yet
    with pytest.raises(ValueError, match="written last"):
        read_index(tmp_path)
    again = FeatureWriter(tmp_path, IDENTITY, source="s", rank=0, per_shard=2)
    assert again.batches == 4
    write(tmp_path, records)
    reader = FeatureReader(tmp_path)
    assert [same(reader.record(i), r) for i, r in enumerate(records)] == [True] * 7
    with pytest.raises(ValueError, match="choose an empty folder"):
        FeatureWriter(tmp_path, IDENTITY, source="other data", rank=0, per_shard=2)


def test_ranks_write_their_own_files_and_one_index(tmp_path):
    parts = [[record(4) for _ in range(3)] for _ in range(2)]
    for rank, part in enumerate(parts):
        write(tmp_path, part, rank=rank, finish=False)
    with pytest.raises(ValueError, match="let every rank write"):
        finish_index(tmp_path, IDENTITY, ranks=3)
    finish_index(tmp_path, IDENTITY, ranks=2)
    reader = FeatureReader(tmp_path)
    assert [same(reader.record(i), r) for i, r in enumerate(parts[0] + parts[1])] == [True] * 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"features_SO": torch.full((4, 6), torch.nan).bfloat16()}, "must be finite"),
        ({"features_SO": torch.zeros(4, 6)}, "must be bfloat16"),
        ({"features_SO": torch.zeros(4, 5).bfloat16()}, r"features \(4, 6\)"),
        ({"features_SO": torch.zeros(5, 6).bfloat16()}, r"features \(4, 6\)"),
        ({"input_ids_S": torch.tensor([1, 2, 50, 3])}, "ids in \\[0, 50\\)"),
    ],
)
def test_bad_records_are_refused_on_writing_and_on_reading(tmp_path, change, reason):
    writer = FeatureWriter(tmp_path, IDENTITY, source="s", rank=0, per_shard=1)
    good = record(4)
    parts = {f.name: getattr(good, f.name) for f in dataclasses.fields(good)} | change
    if parts["features_SO"].shape[0] == 4:
        with pytest.raises(ValueError, match=reason):
            writer.add_batch([FeatureRecord(**parts)])
    write(tmp_path, [good], per_shard=1)
    shard = json.loads((tmp_path / "index.json").read_text())["shards"][0]
    file = tmp_path / shard["file"]
    names = {"input_ids_S": "input_ids", "features_SO": "hidden_states"}
    stored = {
        "0.input_ids": parts["input_ids_S"].int(),
        "0.loss_mask": good.loss_mask_S.to(torch.uint8),
        "0.document_ids": good.document_S,
        f"0.{names['features_SO']}": parts["features_SO"].contiguous(),
    }
    save_file(stored, file)
    text = (tmp_path / "index.json").read_text()
    size = f'"bytes": {file.stat().st_size}'
    (tmp_path / "index.json").write_text(text.replace(f'"bytes": {shard["bytes"]}', size))
    with pytest.raises(ValueError, match=reason):
        FeatureReader(tmp_path).record(0)


def test_index_without_candidates_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must have candidates"):
        write(tmp_path / "none", [record(4, learned=False)])
        read_index(tmp_path / "none")
    write(tmp_path / "cut", [record(4)])
    file = next((tmp_path / "cut").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="copy it again"):
        FeatureReader(tmp_path / "cut")


def loader(folder, **changes):
    options = {"row_tokens": 10, "batch_rows": 2, "rank": 0, "world_size": 1, "seed": 3}
    return FeatureLoader(FeatureReader(folder), **(options | changes))


def test_features_stay_with_their_tokens_and_rows_get_a_tail(tmp_path):
    write(tmp_path, [record(7, documents=(3, 4)), record(10, documents=(10,))])
    inputs, labels = next(loader(tmp_path, shuffle=False))
    for b, n in enumerate((7, 10)):
        assert torch.equal(inputs["features"][b, :n].argmax(-1), inputs["input"][b, :n])
    assert inputs["document_ids"].tolist()[0] == [0, 0, 0, 1, 1, 1, 1, -1, -1, -1]
    assert inputs["positions"].tolist()[0] == [0, 1, 2, 0, 1, 2, 3, 0, 0, 0]
    assert inputs["cu_seqlens"].tolist() == [[0, 3, 7], [0, 10, 10]]
    assert bool((inputs["features"][0, 7:] == 0).all())
    ids = inputs["input"][0].tolist()
    ignored = IGNORE_INDEX
    assert labels[0].tolist() == [*ids[1:3], ignored, *ids[4:7], *[ignored] * 4]


def test_loader_resumes_exactly_over_epochs_and_any_number_of_ranks(tmp_path):
    write(tmp_path, [record(n) for n in (3, 4, 5, 6, 7, 8, 9)])

    def lengths(batch):
        return [int(row) for row in (batch[0]["document_ids"] >= 0).sum(1)]

    whole = loader(tmp_path)
    seen = [lengths(next(whole)) for _ in range(7)]
    flat = [n for batch in seen for n in batch]
    assert sorted(flat[:7]) == sorted(flat[7:]) == [3, 4, 5, 6, 7, 8, 9]
    assert flat[:7] != flat[7:], "the second epoch has an order of its own"
    first = loader(tmp_path)
    for _ in range(4):
        next(first)
    resumed = loader(tmp_path)
    resumed.load_state_dict(first.state_dict())
    assert [lengths(next(resumed)) for _ in range(3)] == seen[4:]
    ranks = [loader(tmp_path, batch_rows=1, rank=r, world_size=2) for r in range(2)]
    for rank in ranks:
        rank.load_state_dict(first.state_dict())
    assert [n for rank in ranks for n in lengths(next(rank))] == seen[4]
    with pytest.raises(ValueError, match="restore features_path"):
        loader(tmp_path, seed=4).load_state_dict(first.state_dict())
    once = loader(tmp_path, repeat=False)
    assert len([*once]) == 3, "the last step is not full"
    with pytest.raises(ValueError, match="raise it"):
        loader(tmp_path, row_tokens=8)


def test_specforge_files_are_read(tmp_path):
    good = record(5)
    content = {
        "input_ids": good.input_ids_S[None],
        "loss_mask": good.loss_mask_S[None].int(),
        "hidden_states": good.features_SO[None],
    }
    torch.save(content, tmp_path / "0.ckpt")
    (read,) = specforge_records([tmp_path / "0.ckpt"], dtype="bfloat16")
    assert same(read, good)
    del content["loss_mask"]
    torch.save(content, tmp_path / "1.ckpt")
    with pytest.raises(ValueError, match="must hold"):
        [*specforge_records([tmp_path / "1.ckpt"], dtype="bfloat16")]
