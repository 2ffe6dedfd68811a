"""Ids that the tokenizer can produce, its mask token and the target's ends of sequence."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_lowprec.data.bundled import resolve_path
from titan_lowprec.models.dflash.features import read_index
from titan_lowprec.titan.merged_config import MergedJobConfig

SPECIAL_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Vocabulary:
    """What the choice of a mask token needs to know."""

    entries: int
    """One more than the largest id."""
    mask_id: int | None
    """The tokenizer's own mask token."""
    eos_ids: tuple[int, ...]
    sha256: str
    """Of tokenizer.json."""


def vocabulary_of(job_config: MergedJobConfig) -> Vocabulary:
    """The tokenizer that the job's ids come from: of stored rows, what their index says."""
    path = job_config.dflash.features_path
    if path and Path(path).exists():
        index = read_index(Path(path))
        return Vocabulary(
            entries=index.tokenizer_entries,
            mask_id=None,
            eos_ids=index.eos_ids,
            sha256=index.tokenizer_sha256,
        )
    return read_vocabulary(Path(resolve_path(job_config.data.tokenizer)))


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read a tokenizer folder; of several files that name a special token, the first counts."""
    import hashlib

    content = (folder / "tokenizer.json").read_bytes()
    parsed = json.loads(content)
    vocabulary = parsed["model"]["vocab"]
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    added = {token["content"]: token["id"] for token in parsed.get("added_tokens", [])}
    size = len(vocabulary)
    largest = max([*ids.values(), *added.values(), size - 1])
    eos_id, mask_id = (_special(folder, key, ids | added) for key in ("eos_token", "mask_token"))
    return Vocabulary(
        entries=largest + 1,
        mask_id=mask_id,
        eos_ids=() if eos_id is None else (eos_id,),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _special(folder: Path, key: str, ids: dict[str, int]) -> int | None:
    for name in SPECIAL_TOKEN_FILES:
        file = folder / name
        value: Any = (
            json.loads(file.read_text(encoding="utf-8")).get(key) if file.is_file() else None
        )
        token = value.get("content") if isinstance(value, dict) else value
        if token in ids:
            return ids[token]
    return None
