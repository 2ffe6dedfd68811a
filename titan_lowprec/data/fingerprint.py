"""A 64-bit fingerprint of a batch that adds up over ranks."""

import numpy as np

from titan_lowprec.shapes import Int64, Tensor


def fingerprint_rows(tokens_BT: Int64[Tensor, "B T"], labels_BT: Int64[Tensor, "B T"]) -> int:
    """Hash ids, labels and their places in each row, and add the rows' hashes modulo 2**64.

    The fingerprint of a global batch is the sum of its parts modulo 2**64, however its rows are
    spread over ranks and micro-batches and in whatever order. A row that is lost, repeated or
    changed alters it but for a chance of 2**-64.
    """
    # uint64 arrays wrap, which is what a hash wants.
    tokens = tokens_BT.cpu().numpy().astype(np.uint64)
    labels = labels_BT.cpu().numpy().astype(np.uint64)
    places = _mix(np.arange(1, tokens.shape[1] + 1, dtype=np.uint64))
    entries = _mix(_mix(tokens + places) ^ labels)
    rows = _mix(entries.sum(axis=1, dtype=np.uint64))
    return int(rows.sum(dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """Finalise as SplitMix64 does."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
