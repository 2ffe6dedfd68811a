"""Documents of Hugging Face datasets, streamed or downloaded."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from titan_lowprec.data.shards import checked_text, missing_column
from titan_lowprec.data.spec import DataSpec


class HubDataset:
    """Documents of ``datasets.load_dataset`` in the data set's own order.

    Nothing of ``datasets`` shuffles, splits between ranks or keeps state here: its shuffle buffer
    loses rows on resume, and its node splits depend on the world size.
    """

    def __init__(self, spec: DataSpec) -> None:
        """Load (or begin to stream) the split and check its column.

        Raises:
            FileNotFoundError: The data set is neither local, nor cached, nor reachable.
            ValueError: The configuration, split or column does not exist.
        """
        self.text_column = spec.text_column
        self._name = "/".join(
            part for part in (spec.hf_name, spec.hf_config, spec.hf_split) if part
        )
        self._request = [spec.hf_name, spec.hf_config, spec.hf_split, spec.hf_revision]
        self._data, columns = _load(spec, self._name)
        if spec.text_column not in columns:
            raise missing_column(self._name, spec.text_column, columns)
        self._data = self._data.select_columns([spec.text_column])

    def describe(self) -> str:
        """Return a name for messages."""
        return self._name

    def identity(self) -> str:
        """Return a hash of the request and of what ``datasets`` calls the data's fingerprint."""
        fingerprint = getattr(self._data, "_fingerprint", "")
        return _digest(["hf", self.text_column, self._request, fingerprint])

    def portable_identity(self) -> str:
        """Return a hash of the request alone."""
        return _digest(["hf", self.text_column, self._request])

    def documents(self, start: int) -> Iterator[str]:
        """Yield the documents from number ``start`` on."""
        data = self._data.skip(start) if start else self._data
        for number, record in enumerate(data, start=start):
            where = f"{self._name}, document {number}"
            yield checked_text(record[self.text_column], where, self.text_column)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _load(spec: DataSpec, name: str) -> tuple[Any, list[str]]:
    """Return the split and its columns, or say what to do when there is none."""
    import datasets  # two seconds, which local files need not wait for

    command = f"hf download --repo-type dataset {spec.hf_name}"
    try:
        data = datasets.load_dataset(
            spec.hf_name,
            name=spec.hf_config or None,
            split=spec.hf_split,
            revision=spec.hf_revision or None,
            streaming=spec.streaming,
        )
        # A stream may not know its columns before its first record.
        columns = data.column_names or list(next(iter(data), {}))
    except OSError as error:
        raise FileNotFoundError(
            f"HubDataset: {name} must be a local folder, cached, or reachable, and is not "
            f"({type(error).__name__}: {error}); with a network run `{command}`, or point at "
            'local files with source="local" and paths=["<folder with .parquet or .jsonl>"]'
        ) from error
    except ValueError as error:
        raise ValueError(
            f"HubDataset: {name} must name a configuration and a split that exist, got: {error}; "
            "set hf_config and hf_split"
        ) from error
    if not columns:
        raise ValueError(
            f"HubDataset: {name} must hold at least one document, got none; choose another split"
        )
    return data, list(columns)
