"""A fixed validation set, and the loss that knowing word frequencies alone would reach."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from titan_lowprec.data.dataset import Cursor, PackedDataset
from titan_lowprec.data.loader import Batch, collate_rows
from titan_lowprec.data.rows import IGNORE_INDEX, PackedRow


def validation_rows(dataset: PackedDataset) -> Iterator[Cursor]:
    """Yield the rows of the first epoch, the same whenever it is called."""
    cursor = Cursor()
    while (rows := dataset.rows_in(cursor)) is not None:
        yield from (Cursor(window=cursor.window, row=row) for row in range(rows))
        cursor = Cursor(window=cursor.window + 1)


def validation_batches(
    dataset: PackedDataset,
    *,
    batch_rows: int,
    rank: int,
    world_size: int,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Yield this rank's part of the first epoch; every rank gets equally many batches.

    The last step is filled with rows whose labels are all ignored, so a mean has to be weighted
    by valid labels: sum losses and labels over ranks, then divide once.

    Args:
        dataset: The validation set; ``repeat`` does not matter.
        batch_rows: Rows of a batch on each rank.
        rank: Of ``world_size`` ranks that share the data.
        world_size: Ranks that share the data.
        max_batches: Batches of each rank; None for the whole set.
    """
    step = batch_rows * world_size
    cursors = validation_rows(dataset)
    batches = 0
    while max_batches is None or batches < max_batches:
        rows = list(islice(cursors, step))
        if not rows:
            return
        mine = rows[rank * batch_rows : (rank + 1) * batch_rows]
        packed: list[PackedRow] = [dataset.row_at(cursor) for cursor in mine]
        packed += [dataset.ignored_row()] * (batch_rows - len(packed))
        yield collate_rows(packed)
        batches += 1


def unigram_entropy(dataset: PackedDataset, *, max_rows: int | None = None) -> float:
    """Return the entropy of the first epoch's labels, in nats per token.

    No model that ignores its input has a lower mean cross-entropy on these labels.
    """
    counts_V = np.zeros(dataset.vocab_size, dtype=np.int64)
    for cursor in islice(validation_rows(dataset), max_rows):
        labels = dataset.row_at(cursor).labels_T.numpy()
        counts_V += np.bincount(labels[labels != IGNORE_INDEX], minlength=len(counts_V))
    shares = counts_V[counts_V > 0] / max(1, counts_V.sum())
    return float(-(shares * np.log(shares)).sum())
