"""Where a data set's tokens come from: one window from a cache, or many from a stream."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol, runtime_checkable

from titan_lowprec.data.manifest import TokenStore, memory_store
from titan_lowprec.data.shards import DocumentSource
from titan_lowprec.data.tokenize import TextTokenizer

logger = logging.getLogger(__name__)


@runtime_checkable
class Windows(Protocol):
    """Tokenised documents by window; the same in every epoch."""

    def store(self, window: int) -> TokenStore | None:
        """Return the documents of a window, or None past the last one."""
        ...


class CachedWindow:
    """The whole corpus as one window."""

    def __init__(self, store: TokenStore) -> None:
        """Keep the store."""
        self._store = store

    def store(self, window: int) -> TokenStore | None:
        """Return the corpus as window 0."""
        return self._store if window == 0 else None


class StreamWindows:
    """Consecutive documents of a source, tokenised when they are needed and one window ahead.

    Cost: every rank reads and tokenises the whole stream, two windows of ids are in memory, and
    resuming reads (but does not tokenise) the documents before the window, or skips them where
    the source can: parquet does by row group.
    """

    def __init__(
        self, source: DocumentSource, tokenizer: TextTokenizer, *, window_documents: int
    ) -> None:
        """Nothing is read before the first window is asked for."""
        self._source = source
        self._tokenizer = tokenizer
        self._window_documents = window_documents
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="window")
        self._lock = threading.Lock()
        self._pending: dict[int, Future[TokenStore | None]] = {}
        self._texts: Iterator[str] = iter(())
        self._next_window = -1

    def store(self, window: int) -> TokenStore | None:
        """Return the documents of a window and begin to read the next."""
        with self._lock:
            current = self._pending.get(window) or self._reader.submit(self._read, window)
            self._pending = {window: current}
        store = current.result()
        if store is not None:
            with self._lock:
                if window + 1 not in self._pending:
                    self._pending[window + 1] = self._reader.submit(self._read, window + 1)
        return store

    def _read(self, window: int) -> TokenStore | None:
        if window != self._next_window:
            start = window * self._window_documents
            if start:
                logger.info("skipping %d documents of %s", start, self._source.describe())
            self._texts = self._source.documents(start)
        texts = _until_exit(islice(self._texts, self._window_documents))
        store = memory_store(texts, self._tokenizer)
        self._next_window = window + 1
        return store if len(store.offset_M1) > 1 else None


def _until_exit(texts: Iterator[str]) -> Iterator[str]:
    """End early when the interpreter does: it waits for this thread."""
    for text in texts:
        if not threading.main_thread().is_alive():
            return
        yield text
