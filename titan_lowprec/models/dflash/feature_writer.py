"""Writing features: sharded by rank, one file at a time, to be continued where it stopped."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from titan_lowprec.models.dflash.features import (
    DTYPES,
    INDEX_FILE,
    FeatureIdentity,
    FeatureIndex,
    FeatureRecord,
    Shard,
    check_record,
    check_shapes,
)


class FeatureWriter:
    """One rank's shards. A batch counts when its file is complete: ``batches`` says how many."""

    def __init__(
        self, folder: Path, identity: FeatureIdentity, *, source: str, rank: int, per_shard: int
    ) -> None:
        """Open a folder, or continue in one.

        Args:
            folder: Made if it does not exist.
            identity: Target, taps, tokenizer and type.
            source: What decides the order of records (a hash); a continued run must have it too.
            rank: Of the processes that write; each has its own files.
            per_shard: Batches of a file.

        Raises:
            ValueError: The folder holds other features.
        """
        if per_shard < 1:
            raise ValueError(f"FeatureWriter: per_shard must be at least 1, got {per_shard}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.identity, self.rank, self.per_shard = folder, identity, rank, per_shard
        self._header = {"identity": asdict(identity), "source": source, "per_shard": per_shard}
        self._shards: list[Shard] = []
        self._pending: list[FeatureRecord] = []
        self._pending_batches = 0
        state = self._progress_file
        if state.is_file():
            content = json.loads(state.read_text())
            found = {name: content[name] for name in self._header}
            if found != json.loads(json.dumps(self._header)):
                raise ValueError(
                    f"FeatureWriter: {folder} must hold features of this target and data, got "
                    f"{found}; continue with those, or choose an empty folder"
                )
            self._shards = [
                Shard(**{**shard, "lengths": tuple(shard["lengths"])})
                for shard in content["shards"]
            ]

    @property
    def _progress_file(self) -> Path:
        return self.folder / f"progress-{self.rank:04d}.json"

    @property
    def batches(self) -> int:
        """Batches of the source in complete files: a continued run skips so many."""
        return sum(shard.batches for shard in self._shards)

    def add_batch(self, records: Iterable[FeatureRecord]) -> None:
        """Take a batch of records; every ``per_shard``-th call writes a file.

        Raises:
            ValueError: A record is not finite or does not fit.
        """
        where = f"batch {self.batches + self._pending_batches} of rank {self.rank}"
        for number, record in enumerate(records):
            what = f"record {number} of {where}"
            parts = tuple(getattr(record, f.name) for f in fields(record))
            check_shapes(parts, self.identity, what=what)
            check_record(record, self.identity, what=what)
            self._pending.append(record)
        self._pending_batches += 1
        if self._pending_batches >= self.per_shard:
            self._write()

    def close(self) -> None:
        """Write what is left as a shorter file."""
        self._write()

    def _write(self) -> None:
        if not self._pending:  # batches without a record wait for one
            return
        name = f"features-{self.rank:04d}-{len(self._shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for i, record in enumerate(self._pending):
            tensors[f"{i}.input_ids"] = record.input_ids_S.int().contiguous()
            tensors[f"{i}.loss_mask"] = record.loss_mask_S.to(torch.uint8).contiguous()
            tensors[f"{i}.document_ids"] = record.document_S.int().contiguous()
            tensors[f"{i}.hidden_states"] = record.features_SO.contiguous()
        path = self.folder / name
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary)
        os.replace(temporary, path)
        shard = Shard(
            file=name,
            lengths=tuple(len(record.input_ids_S) for record in self._pending),
            candidates=sum(record.candidates for record in self._pending),
            max_documents=max(int(record.document_S.max()) + 1 for record in self._pending),
            bytes=path.stat().st_size,
            batches=self._pending_batches,
        )
        self._shards.append(shard)
        self._pending, self._pending_batches = [], 0
        content = {**self._header, "shards": [asdict(shard) for shard in self._shards]}
        _replace(self._progress_file, content)


def finish_index(folder: Path, identity: FeatureIdentity, *, ranks: int) -> FeatureIndex:
    """Join the shards of all ranks in ``index.json``: features exist from then on.

    Raises:
        ValueError: A rank has not written anything.
    """
    shards: list[Shard] = []
    for rank in range(ranks):
        path = folder / f"progress-{rank:04d}.json"
        if not path.is_file():
            raise ValueError(
                f"finish_index: {path} must exist, got none; let every rank write first"
            )
        for shard in json.loads(path.read_text())["shards"]:
            shards.append(Shard(**{**shard, "lengths": tuple(shard["lengths"])}))
    index = FeatureIndex(identity, tuple(shards))
    _replace(folder / INDEX_FILE, index.as_json())
    return index


def _replace(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)


def specforge_records(files: Iterable[Path], *, dtype: str) -> Iterable[FeatureRecord]:
    """Read SpecForge's offline files ``{input_ids, loss_mask, hidden_states}``, one a sequence.

    Raises:
        ValueError: A file lacks one of the three, or holds more than one sequence.
    """
    names = ("input_ids", "loss_mask", "hidden_states")
    for file in files:
        content = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or any(name not in content for name in names):
            raise ValueError(f"specforge_records: {file} must hold {names}, got {type(content)}")
        ids, mask, hidden = (content[name] for name in names)
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids, mask = ids[0], mask[0]
        if hidden.dim() == 3 and hidden.shape[0] == 1:
            hidden = hidden[0]
        if ids.dim() != 1 or hidden.dim() != 2:
            raise ValueError(
                f"specforge_records: {file} must hold one sequence, got input_ids "
                f"{tuple(ids.shape)} and hidden_states {tuple(hidden.shape)}"
            )
        document = torch.zeros(len(ids), dtype=torch.int32)
        yield FeatureRecord(ids.long(), mask.bool(), document, hidden.to(DTYPES[dtype]))
