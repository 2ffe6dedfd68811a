"""A packed data set: a sequence of rows that only seed and epoch decide."""

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from titan_lowprec.data.hub import HubDataset
from titan_lowprec.data.manifest import TokenStore, open_cache
from titan_lowprec.data.order import EpochOrder
from titan_lowprec.data.pack import PackingIndex, PackingRule, pack_documents
from titan_lowprec.data.rows import PackedRow, assemble_row, ignored_row
from titan_lowprec.data.shards import LocalFiles
from titan_lowprec.data.spec import DataSpec
from titan_lowprec.data.statistics import PackingStatistics
from titan_lowprec.data.tokenize import TextTokenizer, load_tokenizer
from titan_lowprec.data.windows import CachedWindow, StreamWindows, Windows

logger = logging.getLogger(__name__)

PLAN = 1
"""Version of packing and order; a state of another one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The next row of the global sequence. A cached data set has only window 0."""

    epoch: int = 0
    window: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """A window in memory together with its rows in one epoch."""

    store: TokenStore
    index: PackingIndex


@dataclass(frozen=True, slots=True)
class RowReference:
    """A row that can be read whatever the data set has moved on to."""

    plan: WindowPlan
    row: int


class PackedDataset:
    """Rows of packed documents, addressed by epoch, window and row."""

    def __init__(
        self, spec: DataSpec, tokenizer: TextTokenizer, windows: Windows, *, contents: str
    ) -> None:
        """Pack the first epoch of a cached corpus; a stream is not read before it is asked for.

        Raises:
            ValueError: The rule leaves no document of a cached corpus to train on.
        """
        self.spec = spec
        self.tokenizer = tokenizer
        self._windows = windows
        self._rule = PackingRule(
            row_tokens=spec.seq_len,
            max_documents=spec.max_documents,
            packer=spec.packer,
            long_document=spec.long_document,
            min_document_tokens=spec.min_document_tokens,
        )
        self._plans: OrderedDict[tuple[int, int], WindowPlan] = OrderedDict()
        self._end_window: int | None = None
        self._lock = threading.RLock()
        self._statistics: dict[int, PackingStatistics] = {}
        self.plan = self._plan_hash(contents)
        if not spec.streaming and not self.rows_in(Cursor()):
            # A stream finds out when its first epoch ends.
            raise self._no_documents()

    def _is_empty(self) -> bool:
        """Whether all windows have been seen and none had a row."""
        seen = self._statistics
        return len(seen) == self._end_window and not any(each.rows for each in seen.values())

    def _no_documents(self) -> ValueError:
        return ValueError(
            f"PackedDataset: at least one document must have min_document_tokens="
            f"{self.spec.min_document_tokens} tokens and be kept by long_document="
            f"{self.spec.long_document!r}, got none; check the data, or relax the two"
        )

    def _plan_hash(self, contents: str) -> str:
        """Hash what decides the rows; a saved position means nothing under another hash."""
        spec = self.spec
        decisive = {
            "version": PLAN,
            "contents": contents,
            "tokenizer": {**self.tokenizer.identity(), "engine_version": ""},
            "row_tokens": spec.seq_len,
            "max_documents": spec.max_documents,
            "packer": spec.packer,
            "long_document": spec.long_document,
            "min_document_tokens": spec.min_document_tokens,
            "seed": spec.seed,
            "window_documents": spec.window_documents if spec.streaming else 0,
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def vocab_size(self) -> int:
        """Smallest vocabulary that holds every id of the tokenizer."""
        return self.tokenizer.vocab_size

    def require_vocab(self, model_vocab_size: int) -> None:
        """Refuse a model whose embedding is smaller than the tokenizer.

        Raises:
            ValueError: ``model_vocab_size`` is below ``vocab_size``.
        """
        if model_vocab_size < self.vocab_size:
            raise ValueError(
                f"PackedDataset: the model's vocabulary must hold the tokenizer's "
                f"{self.vocab_size} ids, got {model_vocab_size}; raise the model's vocab_size to "
                f"{self.vocab_size} or more, or choose a smaller tokenizer"
            )

    @property
    def rows_per_epoch(self) -> int | None:
        """Rows of the first epoch; None for a stream, which does not know.

        Another epoch may differ by a few where rows reach their capacity of documents.
        """
        return None if self.spec.streaming else self.rows_in(Cursor())

    @property
    def statistics(self) -> PackingStatistics:
        """Statistics of the first epoch; for a stream, of the windows seen so far."""
        if not self._statistics:
            self.rows_in(Cursor())
        if not self._statistics:
            raise self._no_documents()
        first, *others = self._statistics.values()
        for other in others:
            first = first + other
        return first

    def packing(self, cursor: Cursor) -> PackingIndex | None:
        """Return which pieces of which documents fill the rows of the cursor's window."""
        plan = self._plan(cursor)
        return None if plan is None else plan.index

    def rows_in(self, cursor: Cursor) -> int | None:
        """Return the rows of the cursor's window, or None past the epoch's last window."""
        plan = self._plan(cursor)
        return None if plan is None else plan.index.rows

    def _plan(self, cursor: Cursor) -> WindowPlan | None:
        key = (cursor.epoch, cursor.window)
        with self._lock:
            if self._end_window is not None and cursor.window >= self._end_window:
                return None
            plan = self._plans.get(key) or self._make_plan(cursor)
            if plan is None:
                self._end_window = cursor.window
                return None
            self._plans[key] = plan
            self._plans.move_to_end(key)
            # Two, so that a validation set survives between rounds next to nothing else.
            while len(self._plans) > 2:
                self._plans.popitem(last=False)
            return plan

    def _make_plan(self, cursor: Cursor) -> WindowPlan | None:
        store = self._windows.store(cursor.window)
        if store is None:
            return None
        order = EpochOrder(self.spec.seed, cursor.epoch, cursor.window)
        index = pack_documents(store.lengths_M, rule=self._rule, order=order)
        if cursor.window not in self._statistics:
            self._statistics[cursor.window] = index.statistics
            what = f"window {cursor.window}" if self.spec.streaming else "epoch"
            logger.info("packed %s (%s): %s", what, self.spec.packer, index.statistics.describe())
        return WindowPlan(store, index)

    def take(self, cursor: Cursor, count: int) -> tuple[list[RowReference], Cursor]:
        """Return the next ``count`` rows from a cursor on, and the cursor after them.

        Rows continue into the next epoch with ``repeat``; otherwise fewer come at the end.

        Raises:
            ValueError: A whole epoch has no row.
        """
        rows: list[RowReference] = []
        while len(rows) < count:
            plan = self._plan(cursor)
            if plan is None:
                if self._is_empty():
                    raise self._no_documents()
                if not self.spec.repeat:
                    break
                cursor = Cursor(epoch=cursor.epoch + 1)
            elif cursor.row < plan.index.rows:
                end = min(cursor.row + count - len(rows), plan.index.rows)
                rows.extend(RowReference(plan, row) for row in range(cursor.row, end))
                cursor = replace(cursor, row=end)
            else:
                cursor = Cursor(epoch=cursor.epoch, window=cursor.window + 1)
        return rows, cursor

    def read(self, reference: RowReference) -> PackedRow:
        """Read one row that ``take`` returned."""
        return assemble_row(
            reference.plan.store,
            reference.plan.index,
            reference.row,
            row_tokens=self.spec.seq_len,
            max_documents=self.spec.max_documents,
            pad_id=self.tokenizer.pad_id,
        )

    def row_at(self, cursor: Cursor) -> PackedRow:
        """Read the row at a cursor.

        Raises:
            IndexError: The window has no such row.
        """
        plan = self._plan(cursor)
        if plan is None or not 0 <= cursor.row < plan.index.rows:
            raise IndexError(
                f"PackedDataset: a row must be below {0 if plan is None else plan.index.rows} "
                f"in window {cursor.window}, got {cursor.row}"
            )
        return self.read(RowReference(plan, cursor.row))

    def row(self, epoch: int, index: int) -> PackedRow:
        """Read row ``index`` of an epoch of a cached data set (window 0 of a stream)."""
        return self.row_at(Cursor(epoch=epoch, row=index))

    def ignored_row(self) -> PackedRow:
        """Return a row without documents."""
        return ignored_row(
            row_tokens=self.spec.seq_len,
            max_documents=self.spec.max_documents,
            pad_id=self.tokenizer.pad_id,
        )


def build_packed_dataset(spec: DataSpec, *, progress: bool = False) -> PackedDataset:
    """Open the source, tokenise it into the cache if need be, and pack its first epoch.

    Args:
        spec: What to read and how to pack it.
        progress: Show a bar while tokenising, on a terminal.

    Raises:
        FileNotFoundError: A file, a tokenizer or a Hugging Face data set is missing.
        ValueError: A column is missing, or no document is left.
    """
    tokenizer = load_tokenizer(spec.tokenizer_path, add_bos=spec.add_bos, add_eos=spec.add_eos)
    source = open_source(spec)
    if spec.streaming:
        windows = StreamWindows(source, tokenizer, window_documents=spec.window_documents)
        return PackedDataset(spec, tokenizer, windows, contents=source.portable_identity())
    store = open_cache(source, tokenizer, cache_dir=spec.cache_dir, progress=progress)
    return PackedDataset(spec, tokenizer, CachedWindow(store), contents=store.sha256)


def check_data(spec: DataSpec) -> None:
    """Check that a spec's tokenizer, files and column exist, without tokenising anything.

    Raises:
        FileNotFoundError: A file, a tokenizer or a Hugging Face data set is missing.
        ValueError: A delimiter or a column is missing.
    """
    load_tokenizer(spec.tokenizer_path, add_bos=spec.add_bos, add_eos=spec.add_eos)
    open_source(spec)


def open_source(spec: DataSpec) -> LocalFiles | HubDataset:
    """Open the documents of a spec and check that they have the text column.

    Raises:
        FileNotFoundError: A file or a Hugging Face data set is missing.
        ValueError: The text column is missing.
    """
    if spec.source == "local":
        return LocalFiles(spec.paths, text_column=spec.text_column)
    return HubDataset(spec)
