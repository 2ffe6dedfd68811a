"""What to read, how to pack it and in which order: one frozen, validated value."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

Source = Literal["local", "hf"]
Packer = Literal["concat", "best_fit"]
LongDocument = Literal["split", "truncate", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """A packed data set. Fields without a default are choices that a caller must make."""

    source: Source
    """``"local"`` reads ``paths``; ``"hf"`` calls ``datasets.load_dataset``."""
    paths: tuple[str, ...] = ()
    """Local files, folders or globs: .jsonl, .json (lines), .parquet, .txt (one document a file),
    each but parquet also as .gz; or ``bundled:train`` and ``bundled:validation``."""
    hf_name: str = ""
    """Hub name or a local folder, as ``load_dataset`` takes it."""
    hf_config: str = ""
    """Configuration of the Hugging Face data set; empty for its default."""
    hf_split: str = "train"
    """Split of the Hugging Face data set."""
    hf_revision: str = ""
    """Git revision on the hub; empty for the newest."""
    streaming: bool = False
    """Tokenise while training instead of once into ``cache_dir``; see ``window_documents``."""
    text_column: str = "text"
    """Column or JSON key that holds the document."""
    tokenizer_path: str
    """Folder with tokenizer.json and tokenizer_config.json, or ``bundled:tokenizer``."""
    seq_len: int
    """Tokens of a packed row."""
    max_documents: int
    """Most documents of a row: ``cu_seqlens`` always has ``max_documents + 1`` entries."""
    packer: Packer
    """``"concat"`` cuts the shuffled stream every ``seq_len`` tokens; ``"best_fit"`` cuts only
    documents longer than a row."""
    long_document: LongDocument
    """Documents longer than a row: ``"split"`` into pieces that are documents of their own,
    ``"truncate"`` to their first ``seq_len`` tokens, or ``"drop"``."""
    min_document_tokens: int = 2
    """Shorter documents (BOS and EOS included) are dropped and counted; 1 token has no label."""
    seed: int
    """The order of an epoch is a function of this and the epoch's number."""
    repeat: bool
    """Begin the next epoch, in another order, where one ends; otherwise the data end."""
    cache_dir: str = ""
    """Folder of the token caches. Required unless ``streaming``."""
    window_documents: int = 8192
    """Streaming shuffles and packs within windows of this many consecutive documents."""
    add_bos: bool = True
    """Begin each document with the tokenizer's BOS id."""
    add_eos: bool = True
    """End each document with the tokenizer's EOS id."""

    def __post_init__(self) -> None:
        """Refuse a spec that cannot be built, before any file is opened."""
        if isinstance(self.paths, str):
            raise ValueError(
                f"DataSpec: paths must be a list of paths, got the text {self.paths!r}; "
                f'write ["{self.paths}"]'
            )
        object.__setattr__(self, "paths", tuple(self.paths))
        for name, allowed in (
            ("source", get_args(Source)),
            ("packer", get_args(Packer)),
            ("long_document", get_args(LongDocument)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"DataSpec: {name} must be one of {allowed}, got {getattr(self, name)!r}"
                )
        self._check_numbers()
        self._check_source()

    def _check_numbers(self) -> None:
        for name, least in (
            ("seq_len", 2),
            ("max_documents", 1),
            ("min_document_tokens", 1),
            ("window_documents", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"DataSpec: {name} must be an integer of at least {least}, got {value!r}"
                )
        if self.seed >= 2**64:
            raise ValueError(f"DataSpec: seed must be below 2**64, got {self.seed}")
        for field in fields(self):
            if field.type is bool and type(getattr(self, field.name)) is not bool:
                raise ValueError(
                    f"DataSpec: {field.name} must be true or false, "
                    f"got {getattr(self, field.name)!r}"
                )

    def _check_source(self) -> None:
        if self.source == "local" and (not self.paths or "" in self.paths):
            raise ValueError(
                f"DataSpec: source='local' needs paths to files or folders, got {self.paths!r}; "
                'name some, or paths=["bundled:train"] for the bundled text'
            )
        if self.source == "hf" and not self.hf_name:
            raise ValueError(
                "DataSpec: source='hf' needs hf_name, got an empty one; "
                'for example hf_name="HuggingFaceFW/fineweb-edu"'
            )
        if not self.tokenizer_path:
            raise ValueError(
                "DataSpec: tokenizer_path is required, got an empty one; "
                'name a folder with tokenizer.json, or "bundled:tokenizer"'
            )
        if not self.streaming and not self.cache_dir:
            raise ValueError(
                "DataSpec: cache_dir is required unless streaming, got an empty one; "
                "name a folder for the token caches"
            )
