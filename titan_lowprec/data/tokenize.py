"""Text to token ids, with BOS and EOS added once per document and by us."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32

from titan_lowprec.data.bundled import resolve_path

ENGINE = "tokenizers"


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A ``tokenizers`` engine together with the ids that delimit a document."""

    engine: tokenizers.Tokenizer
    sha256: str
    """Of tokenizer.json."""
    vocab_size: int
    """One more than the largest id: the smallest vocabulary a model may have."""
    prefix: tuple[int, ...]
    """The BOS id, or nothing."""
    suffix: tuple[int, ...]
    """The EOS id, or nothing."""

    @property
    def pad_id(self) -> int:
        """Id that fills a row past its last document; never a label."""
        return (self.suffix or self.prefix or (0,))[0]

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the ids of a text."""
        return {
            "engine": ENGINE,
            "engine_version": tokenizers.__version__,
            "tokenizer_sha256": self.sha256,
            "prefix": list(self.prefix),
            "suffix": list(self.suffix),
        }

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
        """Encode whole documents; what looks like a special token in a text is plain text.

        Unless the model itself (not its added tokens) has the string as an entry: its ids then
        occur inside documents, and mean nothing there, since boundaries never come from ids.
        """
        encodings = self.engine.encode_batch_fast(
            [_without_surrogates(text) for text in texts], add_special_tokens=False
        )
        return [
            np.array([*self.prefix, *encoding.ids, *self.suffix], dtype=np.int32)
            for encoding in encodings
        ]


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can spell and UTF-8 cannot, by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def load_tokenizer(tokenizer_path: str, *, add_bos: bool, add_eos: bool) -> TextTokenizer:
    """Load a tokenizer folder and resolve its document delimiters.

    Args:
        tokenizer_path: Folder with tokenizer.json and tokenizer_config.json (which names the
            BOS and EOS tokens), the file tokenizer.json itself, or ``bundled:tokenizer``.
        add_bos: Begin each document with BOS.
        add_eos: End each document with EOS. BOS and EOS may be the same id.

    Raises:
        FileNotFoundError: There is no tokenizer.json.
        ValueError: The file cannot be read, or a delimiter that was asked for is not named.
    """
    file = Path(resolve_path(tokenizer_path))
    if file.name != "tokenizer.json":
        file = file / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"load_tokenizer: {file} is required and does not exist; download a model's files with "
            "`hf download <organisation>/<model> tokenizer.json tokenizer_config.json "
            f"--local-dir {file.parent}`, or use bundled:tokenizer"
        )
    content = file.read_bytes()
    try:
        engine = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise ValueError(
            f"load_tokenizer: {file} must be a Hugging Face tokenizer.json, got: {error}; "
            "download the file again or upgrade `tokenizers`"
        ) from error
    engine.encode_special_tokens = True
    engine.no_truncation()
    engine.no_padding()
    return TextTokenizer(
        engine=engine,
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=1 + max(engine.get_vocab(with_added_tokens=True).values()),
        prefix=(_delimiter(engine, file.parent, "bos"),) if add_bos else (),
        suffix=(_delimiter(engine, file.parent, "eos"),) if add_eos else (),
    )


def _delimiter(engine: tokenizers.Tokenizer, folder: Path, which: str) -> int:
    """Return the id of the BOS or EOS token that the folder's configuration names."""
    key = f"{which}_token"
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        value = json.loads(file.read_text(encoding="utf-8")).get(key)
        token = value.get("content") if isinstance(value, dict) else value
        if token is None:
            continue
        token_id = engine.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"load_tokenizer: {key} {token!r} of {file} must be in tokenizer.json, and is not; "
                f"take both files from one model, or set add_{which}=false"
            )
        return token_id
    raise ValueError(
        f"load_tokenizer: add_{which} needs {key} in tokenizer_config.json or "
        f"special_tokens_map.json of {folder}, and neither names one; "
        f"add the file or set add_{which}=false"
    )
