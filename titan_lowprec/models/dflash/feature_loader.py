"""Batches of stored features, with a state of three values that resumes exactly."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from titan_lowprec.models.dflash.blocks import IGNORE_INDEX
from titan_lowprec.models.dflash.features import FeatureReader, FeatureRecord
from titan_lowprec.shapes import Tensor

Batch = tuple[dict[str, Tensor], Tensor]


class FeatureLoader:
    """Iterator over one rank's batches; a step takes the next rows of a global order.

    The order of an epoch is a function of seed and epoch, or the order of writing without
    ``shuffle``. Where an epoch ends within a step the next one fills it, so that the number of
    ranks may change between runs.
    """

    def __init__(
        self,
        reader: FeatureReader,
        *,
        row_tokens: int,
        batch_rows: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        repeat: bool = True,
    ) -> None:
        if reader.index.longest > row_tokens:
            raise ValueError(
                f"FeatureLoader: rows must hold the longest record, {reader.index.longest} "
                f"tokens, got training.seq_len={row_tokens}; raise it"
            )
        if not 0 <= rank < world_size or batch_rows < 1:
            raise ValueError(
                f"FeatureLoader: needs 0 <= rank < world_size and batch_rows >= 1, got {rank}, "
                f"{world_size} and {batch_rows}"
            )
        self.reader, self.row_tokens = reader, row_tokens
        self.batch_rows, self.rank, self.world_size = batch_rows, rank, world_size
        self.seed, self.shuffle, self.repeat = seed, shuffle, repeat
        self.plan = f"{reader.index.digest()}-{seed}-{int(shuffle)}"
        self.epoch, self.row = 0, 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; without ``repeat``, a last step that is not full is left out."""
        numbers: list[int] = []
        epoch, row = self.epoch, self.row
        need = self.batch_rows * self.world_size
        while len(numbers) < need:
            order = self._order(epoch)
            taken = order[row : row + need - len(numbers)]
            numbers += taken.tolist()
            row += len(taken)
            if row == len(order) and len(numbers) < need:
                if not self.repeat:
                    raise StopIteration
                epoch, row = epoch + 1, 0
        self.epoch, self.row = epoch, row
        mine = numbers[self.rank * self.batch_rows :][: self.batch_rows]
        return collate(
            [self.reader.record(number) for number in mine],
            row_tokens=self.row_tokens,
            max_documents=self.reader.index.max_documents,
        )

    def _order(self, epoch: int) -> np.ndarray:
        count = len(self.reader)
        if not self.shuffle:
            return np.arange(count)
        key = np.array([self.seed, epoch], dtype=np.uint64)
        draw = np.random.Philox(key=key).random_raw(count)
        return np.argsort(draw, kind="stable")

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch; equal on every rank."""
        return {"epoch": self.epoch, "rows_consumed": self.row, "plan": self.plan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after a checkpoint's last batch; refuse other features or another order."""
        if state["plan"] != self.plan:
            raise ValueError(
                f"FeatureLoader: the checkpoint read features {state['plan']}, these are "
                f"{self.plan}; restore features_path and data.seed, or start a new run"
            )
        self.epoch, self.row = int(state["epoch"]), int(state["rows_consumed"])

    def close(self) -> None:
        """Nothing stays open between batches."""


def collate(records: list[FeatureRecord], *, row_tokens: int, max_documents: int) -> Batch:
    """Stack records into rows; shorter ones get a tail without documents."""
    B, S = len(records), row_tokens
    inputs = {
        "input": torch.zeros(B, S, dtype=torch.int64),
        "positions": torch.zeros(B, S, dtype=torch.int64),
        "document_ids": torch.full((B, S), -1, dtype=torch.int32),
        "cu_seqlens": torch.zeros(B, max_documents + 1, dtype=torch.int32),
        "loss_mask": torch.zeros(B, S, dtype=torch.bool),
        "features": torch.zeros(
            B, S, records[0].features_SO.shape[1], dtype=records[0].features_SO.dtype
        ),
    }
    for b, record in enumerate(records):
        n = len(record.input_ids_S)
        inputs["input"][b, :n] = record.input_ids_S
        inputs["document_ids"][b, :n] = record.document_S
        inputs["loss_mask"][b, :n] = record.loss_mask_S
        inputs["features"][b, :n] = record.features_SO
    document = inputs["document_ids"]
    index = torch.arange(max_documents)
    ends = (document[:, :, None] == index).sum(1).cumsum(1)
    inputs["cu_seqlens"][:, 1:] = ends.int()
    begin = inputs["cu_seqlens"].long().gather(1, document.long().clamp(min=0))
    inputs["positions"] = ((torch.arange(S) - begin) * (document >= 0)).long()
    labels = torch.full((B, S), IGNORE_INDEX)
    follows = (document[:, 1:] == document[:, :-1]) & inputs["loss_mask"][:, 1:]
    follows &= document[:, 1:] >= 0
    labels[:, :-1] = torch.where(follows, inputs["input"][:, 1:], IGNORE_INDEX)
    return inputs, labels
