"""Documents of local files, in a fixed order, from any document on."""

import glob
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from titan_lowprec.data.bundled import resolve_path

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".jsonl.gz", ".json.gz", ".txt.gz")


@runtime_checkable
class DocumentSource(Protocol):
    """Documents in an order that never changes."""

    def describe(self) -> str:
        """Return a name for messages."""
        ...

    def identity(self) -> str:
        """Return a text that changes when the documents do; names a cache on this machine."""
        ...

    def portable_identity(self) -> str:
        """Return a text that is equal for the same documents on another machine."""
        ...

    def documents(self, start: int) -> Iterator[str]:
        """Yield the documents from number ``start`` on, without tokenising those before."""
        ...


class LocalFiles:
    """Documents of files: sorted within each path given, paths in the order given."""

    def __init__(self, paths: Sequence[str], *, text_column: str) -> None:
        """Find the files and check that the first document of each kind can be read."""
        self.files = find_files(paths)
        self.text_column = text_column
        for file in self.files:
            if file.suffix == ".parquet":
                _parquet_file(file, text_column).close()
        first = self.files[0]
        if first.suffix != ".parquet" and next(_read(first, text_column, 0), None) is None:
            raise ValueError(
                f"LocalFiles: {first} must hold at least one document, got none; remove the file"
            )

    def describe(self) -> str:
        """Return a name for messages."""
        more = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
        return f"{self.files[0]}{more}"

    def identity(self) -> str:
        """Return the hash of names, sizes and times of the files, and of the column read."""
        entries: list[tuple[str, int, int]] = []
        for file in self.files:
            status = file.stat()
            entries.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
        return _digest(["local", self.text_column, entries])

    def portable_identity(self) -> str:
        """Return the hash of file names and sizes alone: equal for a copy on another machine."""
        entries = [(file.name, file.stat().st_size) for file in self.files]
        return _digest(["local", self.text_column, entries])

    def documents(self, start: int) -> Iterator[str]:
        """Yield the documents from number ``start`` on; parquet skips whole row groups."""
        for file in self.files:
            if start and file.suffix == ".parquet":
                rows = pq.read_metadata(file).num_rows
                if rows <= start:
                    start -= rows
                    continue
            skipped = 0
            for text in _read(file, self.text_column, start):
                if text is None:
                    skipped += 1
                    continue
                yield text
            start -= skipped


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files of a list of files, folders and globs, each once.

    Raises:
        FileNotFoundError: A path does not exist, or a folder or glob holds no readable file.
        ValueError: A file has a suffix that we do not read.
    """
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(resolve_path(name))
        if path.is_dir():
            files = sorted(
                file
                for file in path.rglob("*")
                if file.name.endswith(SUFFIXES)
                # Downloaders keep their books in hidden folders.
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
        elif path.is_file():
            if not path.name.endswith(SUFFIXES):
                raise ValueError(
                    f"find_files: a file must end in one of {SUFFIXES}, got {path}; convert it"
                )
            files = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            files = [file for file in matches if file.name.endswith(SUFFIXES) and file.is_file()]
        if not files:
            what = "holds no such file" if path.exists() else "does not exist"
            raise FileNotFoundError(
                f"find_files: a path must be a file, folder or glob with files ending in "
                f"{SUFFIXES}; {path} {what}; correct the path or download the data first"
            )
        found.update(dict.fromkeys(files))
    return list(found)


def _read(file: Path, text_column: str, start: int) -> Iterator[str | None]:
    """Yield None for each of the first ``start`` documents of a file, then the others' text."""
    if file.suffix == ".parquet":
        return _read_parquet(file, text_column, start)
    if file.name.endswith((".txt", ".txt.gz")):
        return _read_text(file, start)
    return _read_json_lines(file, text_column, start)


def _open(file: Path) -> BufferedReader | gzip.GzipFile:
    return gzip.GzipFile(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _read_text(file: Path, start: int) -> Iterator[str | None]:
    if start > 0:
        yield None
        return
    with _open(file) as stream:
        yield _decode(stream.read(), str(file))


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"LocalFiles: {where} must be UTF-8, got byte {content[error.start]:#04x} at "
            f"{error.start}; convert the file"
        ) from error


def _read_json_lines(file: Path, text_column: str, start: int) -> Iterator[str | None]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            if start > 0:
                start -= 1
                yield None
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(_decode(line, where))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"LocalFiles: {where} must be one JSON object, got: {error}; "
                    "write one object a line"
                ) from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"LocalFiles: {where} must be one JSON object, got {type(record).__name__}; "
                    "write one object a line"
                )
            if text_column not in record:
                raise missing_column(where, text_column, list(record))
            yield checked_text(record[text_column], where, text_column)


def _parquet_file(file: Path, text_column: str) -> pq.ParquetFile:
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"LocalFiles: {file} must be a parquet file, got: {error}; download it again"
        ) from error
    if text_column not in parquet.schema_arrow.names:
        raise missing_column(str(file), text_column, parquet.schema_arrow.names)
    return parquet


def _read_parquet(file: Path, text_column: str, start: int) -> Iterator[str | None]:
    with _parquet_file(file, text_column) as parquet:
        number = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if number + rows <= start:
                yield from [None] * rows
                number += rows
                continue
            for batch in parquet.iter_batches(
                batch_size=1024, row_groups=[group], columns=[text_column]
            ):
                for value in batch.column(0).to_pylist():
                    number += 1
                    if number <= start:
                        yield None
                    else:
                        yield checked_text(value, f"{file}, row {number}", text_column)


def missing_column(where: str, text_column: str, found: list[str]) -> ValueError:
    """Return the error for a text column that a source lacks."""
    return ValueError(
        f"text_column: {where} must have a column {text_column!r}, got columns {sorted(found)}; "
        "set text_column to the one with the documents"
    )


def checked_text(value: object, where: str, text_column: str) -> str:
    """Return a document's text.

    Raises:
        ValueError: The value is not a text.
    """
    if not isinstance(value, str):
        raise ValueError(
            f"text_column: {text_column!r} of {where} must be a text, got "
            f"{type(value).__name__}; choose another column or remove the record"
        )
    return value
