"""A target's hidden states on disk: what one record holds, the index, and reading them back.

A folder has safetensors shards and ``index.json``, written last. Tensors of record ``i`` of a shard
are ``i.input_ids``, ``i.loss_mask``, ``i.document_ids`` and ``i.hidden_states``.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from titan_lowprec.models.dflash.anchors import anchor_candidates
from titan_lowprec.shapes import Bool, Float, Int32, Int64, Tensor

INDEX_FILE = "index.json"
UNKNOWN_TARGET = "unknown"
"""Target of imported features that do not name one."""
FORMAT = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class FeatureRecord:
    """One row of tokens with the target's taps at the same indices; nothing is shifted."""

    input_ids_S: Int64[Tensor, " S"]
    loss_mask_S: Bool[Tensor, " S"]
    """Tokens that the draft should learn to produce."""
    document_S: Int32[Tensor, " S"]
    """Document of each token; -1 in a tail of padding."""
    features_SO: Float[Tensor, "S O"]

    @property
    def candidates(self) -> int:
        """Tokens that may begin a block."""
        return int(anchor_candidates(self.loss_mask_S[None], self.document_S[None]).sum())


@dataclass(frozen=True, slots=True)
class FeatureIdentity:
    """What features belong to: they fit no other target, tokenizer or taps."""

    target: str
    """Name and a hash of the target's weights."""
    tap_layers: tuple[int, ...]
    """Empty for rows of tokens whose hidden states are computed when they are trained on."""
    model_dim: int
    vocab_size: int
    dtype: str
    """``bfloat16`` or ``float32``."""
    tokenizer_sha256: str
    tokenizer_entries: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"FeatureIdentity: dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}"
            )

    @property
    def feature_dim(self) -> int:
        """Width of the taps side by side."""
        return len(self.tap_layers) * self.model_dim


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of records."""

    file: str
    lengths: tuple[int, ...]
    """Tokens of each record."""
    candidates: int
    max_documents: int
    bytes: int
    batches: int
    """Batches of the source that the file ends; where a continued run goes on."""

    @property
    def records(self) -> int:
        """Records of the file."""
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class FeatureIndex:
    """``index.json``: identity, and every shard in order."""

    identity: FeatureIdentity
    shards: tuple[Shard, ...]

    @property
    def tokenizer_entries(self) -> int:
        """One more than the tokenizer's largest id."""
        return self.identity.tokenizer_entries

    @property
    def tokenizer_sha256(self) -> str:
        """Of tokenizer.json."""
        return self.identity.tokenizer_sha256

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The target's ends of sequence."""
        return self.identity.eos_ids

    @property
    def records(self) -> int:
        """Records of all shards."""
        return sum(shard.records for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all records, padding included."""
        return sum(sum(shard.lengths) for shard in self.shards)

    @property
    def longest(self) -> int:
        """Tokens of the longest record."""
        return max(max(shard.lengths) for shard in self.shards)

    @property
    def candidates(self) -> int:
        """Tokens that may begin a block."""
        return sum(shard.candidates for shard in self.shards)

    @property
    def max_documents(self) -> int:
        """Documents of the record that has most."""
        return max(shard.max_documents for shard in self.shards)

    def digest(self) -> str:
        """Hash of everything that decides which features are read in which order."""
        return hashlib.sha256(json.dumps(self.as_json()).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        shards = [asdict(shard) for shard in self.shards]
        return {"format": FORMAT, "identity": asdict(self.identity), "shards": shards}


def read_index(folder: Path) -> FeatureIndex:
    """Read ``index.json``.

    Raises:
        ValueError: There is none (writing was interrupted, say), it is of another format, or no
            record has a token that may begin a block.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        raise ValueError(
            f"features: {folder} must hold {INDEX_FILE}, which is written last, got none; run "
            "tools/dflash_features.py, again if it was interrupted"
        )
    content = json.loads(path.read_text())
    if content.get("format") != FORMAT:
        raise ValueError(
            f"features: {path} must be of format {FORMAT}, got {content.get('format')!r}; write "
            "the features again"
        )
    index = FeatureIndex(
        identity=FeatureIdentity(**_tuples(FeatureIdentity, content["identity"])),
        shards=tuple(Shard(**_tuples(Shard, shard)) for shard in content["shards"]),
    )
    if index.candidates == 0:
        raise ValueError(
            f"features: {folder} must have candidates for anchors (two learned tokens in a row), "
            f"got none in {index.records} records; check loss_mask"
        )
    return index


def _tuples(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Values of a dataclass from JSON, whose lists were tuples."""
    names = {field.name for field in fields(cls)}
    if set(values) != names:
        raise ValueError(
            f"features: {cls.__name__} must have {sorted(names)}, got {sorted(values)}; write the "
            "features again"
        )
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


class FeatureReader:
    """Records of a folder by number, checked as they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self._first = [0]
        for shard in self.index.shards:
            self._first.append(self._first[-1] + shard.records)
            file = folder / shard.file
            size = file.stat().st_size if file.is_file() else None
            if size != shard.bytes:
                raise ValueError(
                    f"features: {file} must have {shard.bytes} bytes, got {size}; copy it again"
                )

    def __len__(self) -> int:
        return self.index.records

    def record(self, number: int) -> FeatureRecord:
        """Read one record.

        Raises:
            ValueError: The file is not what the index says, or features are not finite.
        """
        where = max(i for i, first in enumerate(self._first[:-1]) if first <= number)
        shard, inside = self.index.shards[where], number - self._first[where]
        names = ("input_ids", "loss_mask", "document_ids", "hidden_states")
        with safe_open(self.folder / shard.file, framework="pt") as file:
            parts = tuple(file.get_tensor(f"{inside}.{name}") for name in names)
        what = f"record {inside} of {self.folder / shard.file}"
        check_shapes(parts, self.index.identity, what=what)
        ids, mask, document, hidden = parts
        record = FeatureRecord(ids.long(), mask.bool(), document.int(), hidden)
        check_record(record, self.index.identity, what=what)
        if len(ids) != shard.lengths[inside]:
            raise ValueError(
                f"features: {what} must have {shard.lengths[inside]} tokens, got {len(ids)}; the "
                "file and index.json do not belong together"
            )
        return record


def check_shapes(parts: tuple[Tensor, ...], identity: FeatureIdentity, *, what: str) -> None:
    """Refuse ids, mask, documents and features of a record that do not fit one another."""
    shapes = tuple(tuple(part.shape) for part in parts)
    S = len(parts[0])
    if S == 0 or shapes != ((S,), (S,), (S,), (S, identity.feature_dim)):
        raise ValueError(
            f"features: {what} must have ids, mask and documents of one length (at least 1) and "
            f"features {(S, identity.feature_dim)}, got {shapes}"
        )


def check_record(record: FeatureRecord, identity: FeatureIdentity, *, what: str) -> None:
    """Refuse a record of another type, with ids past the vocabulary or with values not finite."""
    if record.features_SO.dtype != DTYPES[identity.dtype]:
        raise ValueError(
            f"features: {what} must be {identity.dtype}, got {record.features_SO.dtype}"
        )
    low, high = int(record.input_ids_S.min()), int(record.input_ids_S.max())
    if low < 0 or high >= identity.vocab_size:
        raise ValueError(
            f"features: {what} must have ids in [0, {identity.vocab_size}), got {low} to {high}; "
            "tokenizer and target do not belong together"
        )
    if not bool(record.features_SO.isfinite().all()):
        raise ValueError(
            f"features: {what} must be finite, got {int((~record.features_SO.isfinite()).sum())} "
            "values that are not; look at the target's weights and its dtype"
        )
