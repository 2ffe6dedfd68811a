"""Batches of packed rows for one rank, with a state of a few integers."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from titan_lowprec.data.dataset import Cursor, PackedDataset, RowReference
from titan_lowprec.data.rows import PackedRow
from titan_lowprec.formats.token_blocks import check_cu_seqlens
from titan_lowprec.shapes import Tensor

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, Tensor], Tensor]
"""Inputs by name, and labels."""


def collate_rows(rows: Sequence[PackedRow]) -> Batch:
    """Stack rows into the inputs and labels of a batch."""
    cu_seqlens_BM1 = torch.stack([row.cu_seqlens_M1 for row in rows])
    tokens_BT = torch.stack([row.tokens_T for row in rows])
    check_cu_seqlens(cu_seqlens_BM1, total_tokens=tokens_BT.shape[1])
    inputs = {
        "input": tokens_BT,
        "positions": torch.stack([row.positions_T for row in rows]),
        "document_ids": torch.stack([row.document_ids_T for row in rows]),
        "cu_seqlens": cu_seqlens_BM1,
        "block_index": torch.stack([row.block_index_T for row in rows]),
    }
    return inputs, torch.stack([row.labels_T for row in rows])


class PackedLoader:
    """Iterator over the batches of one rank.

    A step of all ranks takes the next ``batch_rows * world_size`` rows of the global sequence,
    rank after rank. An epoch that ends within a step continues with the next one, so no row is
    lost or repeated at any world size. Without ``repeat``, a last step that cannot be filled on
    every rank is not handed out: ``exhausted`` is then true and ``dropped_rows`` counts its rows.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        batch_rows: int,
        rank: int,
        world_size: int,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Start at the beginning of epoch 0.

        Args:
            dataset: The rows.
            batch_rows: Rows of a batch on each rank.
            rank: Of ``world_size`` ranks that share the data, not of all processes.
            world_size: Ranks that share the data.
            num_workers: Threads that assemble batches; 0 does it when a batch is asked for.
            prefetch: Batches that workers hold ready.
            pin_memory: Return page-locked tensors, for copies that overlap with a GPU's work.
        """
        for name, value, least in (
            ("batch_rows", batch_rows, 1),
            ("world_size", world_size, 1),
            ("num_workers", num_workers, 0),
            ("prefetch", prefetch, 1),
        ):
            if value < least:
                raise ValueError(f"PackedLoader: {name} must be at least {least}, got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"PackedLoader: rank must be in 0..{world_size - 1} (world_size={world_size}), "
                f"got {rank}"
            )
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("PackedLoader: pin_memory needs a CUDA device, got none; set it false")
        self.dataset = dataset
        self.batch_rows, self.rank, self.world_size = batch_rows, rank, world_size
        self.exhausted = False
        self.dropped_rows = 0
        self._pin_memory = pin_memory
        self._prefetch = prefetch
        self._pool = None
        if num_workers:
            # a thread's device is 0 until it is set, and pinning would open a context there
            device = torch.cuda.current_device() if pin_memory else None

            def set_device() -> None:
                if device is not None:
                    torch.cuda.set_device(device)

            self._pool = ThreadPoolExecutor(num_workers, "loader", initializer=set_device)
        self._restart(Cursor())

    def _restart(self, cursor: Cursor) -> None:
        """Continue from a cursor; batches in flight belong to the old lists and are forgotten."""
        self._handed_out = cursor
        self._flight = _Flight(self, cursor)

    def __iter__(self) -> Iterator[Batch]:
        """Return the loader itself: it continues where it stands, it never restarts."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: The data have ended and ``repeat`` is false.
        """
        if self._pool is None:
            rows, after = self._claim(self._handed_out)
            batch = self._assemble(rows)
        else:
            rows, after, batch = self._flight.next(self._pool, self._prefetch)
        if batch is None:
            if not self.exhausted:
                logger.info("data exhausted, %d rows of a partial step dropped", len(rows))
            self.exhausted, self.dropped_rows = True, len(rows)
            raise StopIteration
        self._handed_out = after
        return batch

    def _claim(self, cursor: Cursor) -> tuple[list[RowReference], Cursor]:
        return self.dataset.take(cursor, self.batch_rows * self.world_size)

    def _assemble(self, rows: list[RowReference]) -> Batch | None:
        """Read this rank's share of a step, or return None for a step that is not full."""
        if len(rows) < self.batch_rows * self.world_size:
            return None
        first = self.rank * self.batch_rows
        mine = rows[first : first + self.batch_rows]
        inputs, labels = collate_rows([self.dataset.read(row) for row in mine])
        if self._pin_memory:
            inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
            labels = labels.pin_memory()
        return inputs, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out; equal on every rank."""
        cursor = self._handed_out
        return {
            "epoch": cursor.epoch,
            "window": cursor.window,
            "rows_consumed": cursor.row,
            "plan": self.dataset.plan,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch handed out before ``state_dict``, at any world size.

        Raises:
            ValueError: The state is not one of ours, or belongs to other data or another plan.
        """
        wanted = {"epoch", "window", "rows_consumed", "plan"}
        if set(state) != wanted:
            raise ValueError(
                f"PackedLoader: a state must have {sorted(wanted)}, got {sorted(state)}; "
                "it was saved by another loader"
            )
        if state["plan"] != self.dataset.plan:
            raise ValueError(
                f"PackedLoader: the state belongs to plan {state['plan']}, and this data set has "
                f"plan {self.dataset.plan}; restore text, tokenizer, seed, seq_len, packer, "
                "long_document, max_documents, min_document_tokens and window_documents, or "
                "start a new run"
            )
        cursor = Cursor(
            epoch=int(state["epoch"]),
            window=int(state["window"]),
            row=int(state["rows_consumed"]),
        )
        available = self.dataset.rows_in(cursor) or 0
        if min(cursor.epoch, cursor.window, cursor.row) < 0 or cursor.row > available:
            raise ValueError(
                f"PackedLoader: rows_consumed must be within 0..{available} of epoch "
                f"{cursor.epoch}, window {cursor.window}; got {cursor.row}; the state is damaged"
            )
        self.exhausted, self.dropped_rows = False, 0
        self._restart(cursor)

    def close(self) -> None:
        """Stop the worker threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class _Flight:
    """Batches that worker threads assemble ahead of the one handed out, in order."""

    def __init__(self, loader: PackedLoader, cursor: Cursor) -> None:
        self._loader = loader
        self._ahead = cursor
        self._lock = threading.Lock()
        self._unclaimed: deque[Future[Any]] = deque()
        self._ready: deque[Future[Any]] = deque()

    def next(
        self, pool: ThreadPoolExecutor, prefetch: int
    ) -> tuple[list[RowReference], Cursor, Batch | None]:
        """Wait for the oldest batch, after asking for as many as are to be ready."""
        while len(self._ready) <= prefetch:
            slot: Future[Any] = Future()
            self._ready.append(slot)
            self._unclaimed.append(slot)
            pool.submit(self._fill)
        return self._ready.popleft().result()

    def _fill(self) -> None:
        # Slot and rows are claimed under one lock, so slots are filled in the sequence's order.
        with self._lock:
            slot = self._unclaimed.popleft()
            try:
                rows, after = self._loader._claim(self._ahead)
            except BaseException as error:
                slot.set_exception(error)
                return
            self._ahead = after
        try:
            slot.set_result((rows, after, self._loader._assemble(rows)))
        except BaseException as error:
            slot.set_exception(error)
