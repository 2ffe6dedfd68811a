"""The token cache: a corpus tokenised once, int32 ids in one file and offsets in another.

A cache is a folder named by the hash of everything that decides its contents. It is written
under another name, described by a manifest and renamed, so a folder with a valid manifest is
complete. One process builds under a file lock, which the system releases when it dies; others
wait for the lock and then find the finished folder.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64
from tqdm import tqdm

from titan_lowprec.data.shards import DocumentSource
from titan_lowprec.data.tokenize import TextTokenizer

logger = logging.getLogger(__name__)

LAYOUT = 1
"""Version of the files' layout; a cache of another one is never read."""

BATCH_DOCUMENTS = 256
"""Documents handed to the tokenizer at a time: enough for its threads, little memory."""

TOKENS, OFFSETS, MANIFEST = "tokens.bin", "offsets.bin", "manifest.json"


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Tokenised documents, one after the other."""

    tokens_N: Int32[np.ndarray, " N"]
    offset_M1: Int64[np.ndarray, " M1"]
    """Document ``m`` is ``tokens_N[offset_M1[m]:offset_M1[m + 1]]``."""
    sha256: str
    """Of ids and document lengths: equal for equal contents, wherever they were made."""

    @property
    def lengths_M(self) -> Int64[np.ndarray, " M"]:
        """Return the tokens of each document."""
        return np.diff(self.offset_M1)


def tokenize_documents(
    texts: Iterator[str], tokenizer: TextTokenizer
) -> Iterator[tuple[Int32[np.ndarray, " N"], list[int], int]]:
    """Yield the ids of batches of documents, the documents' lengths, and the batch's characters."""
    while batch := list(islice(texts, BATCH_DOCUMENTS)):
        encoded = tokenizer.encode(batch)
        yield np.concatenate(encoded), [len(ids) for ids in encoded], sum(map(len, batch))


def memory_store(texts: Iterator[str], tokenizer: TextTokenizer) -> TokenStore:
    """Tokenise documents into memory."""
    ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    lengths: list[int] = []
    for batch_N, batch_lengths, _ in tokenize_documents(texts, tokenizer):
        ids.append(batch_N)
        lengths.extend(batch_lengths)
    offset_M1 = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    return TokenStore(np.concatenate(ids), offset_M1, "")


def open_cache(
    source: DocumentSource, tokenizer: TextTokenizer, *, cache_dir: str, progress: bool
) -> TokenStore:
    """Open the token cache of a source, after building it if there is none.

    Args:
        source: The documents.
        tokenizer: Its file, engine and version are part of the cache's name.
        cache_dir: Folder of caches, shared by any number of processes.
        progress: Show a bar while building, on a terminal.

    Raises:
        ValueError: The source holds no document, or the folder cannot be written.
    """
    identity = {"layout": LAYOUT, "source": source.identity(), **tokenizer.identity()}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    folder = Path(cache_dir).expanduser() / name
    store = _open(folder, identity)
    if store is not None:
        return store
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{name}.lock").open("w")
    except OSError as error:
        raise ValueError(
            f"open_cache: cache_dir must be a folder we can write to, got {cache_dir!r} "
            f"({error}); set cache_dir to another one"
        ) from error
    with lock, _locked(lock.fileno(), folder):
        store = _open(folder, identity)
        if store is None:
            _build(folder, identity, source, tokenizer, progress=progress)
            store = _open(folder, identity)
    assert store is not None
    return store


@contextmanager
def _locked(descriptor: int, folder: Path) -> Iterator[None]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("another process builds the token cache %s; waiting for it", folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield


def _open(folder: Path, identity: dict[str, Any]) -> TokenStore | None:
    """Return the store of a complete cache, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        token_bytes = (folder / TOKENS).stat().st_size
        offset_bytes = (folder / OFFSETS).stat().st_size
    except (OSError, json.JSONDecodeError):
        return None
    if (
        manifest.get("identity") != identity
        or token_bytes != 4 * manifest["tokens"]
        or offset_bytes != 8 * (manifest["documents"] + 1)
    ):
        return None
    empty = manifest["tokens"] == 0  # which cannot be mapped
    return TokenStore(
        np.empty(0, np.int32) if empty else np.memmap(folder / TOKENS, dtype=np.int32, mode="r"),
        np.fromfile(folder / OFFSETS, dtype=np.int64),
        manifest["sha256"],
    )


def _build(
    folder: Path,
    identity: dict[str, Any],
    source: DocumentSource,
    tokenizer: TextTokenizer,
    *,
    progress: bool,
) -> None:
    """Tokenise a source into a folder; the caller holds the lock."""
    for left_over in (*folder.parent.glob(f"{folder.name}.part*"), folder):
        if left_over.exists():
            logger.warning("removing the incomplete token cache %s", left_over)
            shutil.rmtree(left_over)
    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    part.mkdir()
    logger.info("tokenising %s into %s", source.describe(), folder)
    try:
        manifest = _write_tokens(part, source, tokenizer, progress=progress)
        with (part / MANIFEST).open("w", encoding="utf-8") as stream:
            json.dump({"identity": identity, **manifest}, stream, indent=2)
            _to_disk(stream)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    logger.info("tokenised %d documents, %d tokens", manifest["documents"], manifest["tokens"])


def _write_tokens(
    part: Path, source: DocumentSource, tokenizer: TextTokenizer, *, progress: bool
) -> dict[str, Any]:
    """Write ids and offsets; return what the manifest says of them."""
    contents = hashlib.sha256()
    lengths = array("q")
    with (
        (part / TOKENS).open("wb") as stream,
        tqdm(unit="char", unit_scale=True, desc="tokenise", disable=not progress or None) as bar,
    ):
        for ids_N, batch_lengths, characters in tokenize_documents(source.documents(0), tokenizer):
            contents.update(ids_N.data)
            stream.write(ids_N.data)
            lengths.extend(batch_lengths)
            bar.update(characters)
        _to_disk(stream)
    if not lengths:
        raise ValueError(
            f"open_cache: {source.describe()} must hold at least one document, got none; "
            "check the paths, or the split"
        )
    offset_M1 = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    contents.update(offset_M1.data)
    with (part / OFFSETS).open("wb") as stream:
        stream.write(offset_M1.data)
        _to_disk(stream)
    return {
        "documents": len(lengths),
        "tokens": int(offset_M1[-1]),
        "dtype": "int32",
        "sha256": contents.hexdigest(),
    }


def _to_disk(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
