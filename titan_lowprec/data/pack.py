"""Documents to rows: which tokens of which document fill each row of an epoch."""

from array import array
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from titan_lowprec.data.order import EpochOrder
from titan_lowprec.data.spec import LongDocument, Packer
from titan_lowprec.data.statistics import PackingStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRule:
    """How documents fill rows."""

    row_tokens: int
    max_documents: int
    packer: Packer
    long_document: LongDocument
    min_document_tokens: int


@dataclass(frozen=True, slots=True)
class PackingIndex:
    """Pieces of documents, row after row in the order in which rows are handed out."""

    document_P: Int64[np.ndarray, " P"]
    start_P: Int64[np.ndarray, " P"]
    """First token of the piece in its document."""
    length_P: Int64[np.ndarray, " P"]
    first_piece_R1: Int64[np.ndarray, " R1"]
    """Pieces of row ``r`` are ``first_piece_R1[r]`` up to ``first_piece_R1[r + 1]``."""
    statistics: PackingStatistics

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.first_piece_R1) - 1


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces in the packer's order; ``row_P`` never decreases."""

    document_P: Int64[np.ndarray, " P"]
    start_P: Int64[np.ndarray, " P"]
    length_P: Int64[np.ndarray, " P"]
    row_P: Int64[np.ndarray, " P"]


def pack_documents(
    lengths_N: Int64[np.ndarray, " N"], *, rule: PackingRule, order: EpochOrder
) -> PackingIndex:
    """Pack one epoch (or one window of a stream) of documents into rows.

    Every token of every document that the rule keeps lands in exactly one row. A piece is a
    document of its own in its row: positions restart and nothing is predicted across a cut.

    Args:
        lengths_N: Tokens of each document, delimiters included.
        rule: How documents fill rows.
        order: The epoch's shuffles, of documents before and of rows after packing.
    """
    shuffled_N = order.documents(len(lengths_N))
    kept_N = shuffled_N[lengths_N[shuffled_N] >= rule.min_document_tokens]
    kept_lengths_N = lengths_N[kept_N]
    if rule.long_document == "drop":
        fits_N = kept_lengths_N <= rule.row_tokens
        kept_N, kept_lengths_N = kept_N[fits_N], kept_lengths_N[fits_N]
    elif rule.long_document == "truncate":
        kept_lengths_N = np.minimum(kept_lengths_N, rule.row_tokens)
    pack = _concatenate if rule.packer == "concat" else _best_fit
    pieces = pack(kept_lengths_N, rule)
    rows = int(pieces.row_P[-1]) + 1 if len(pieces.row_P) else 0
    counts_R = np.bincount(pieces.row_P, minlength=rows)
    statistics = _count(lengths_N, kept_N, kept_lengths_N, pieces, counts_R, rule)

    row_order_R = order.rows(rows)
    first_R = np.cumsum(counts_R) - counts_R
    new_counts_R = counts_R[row_order_R]
    first_piece_R1 = np.concatenate([[0], np.cumsum(new_counts_R)]).astype(np.int64)
    shift_P = np.repeat(first_R[row_order_R] - first_piece_R1[:-1], new_counts_R)
    take_P = np.arange(len(shift_P)) + shift_P
    return PackingIndex(
        kept_N[pieces.document_P[take_P]],
        pieces.start_P[take_P],
        pieces.length_P[take_P],
        first_piece_R1,
        statistics,
    )


def _concatenate(lengths_N: Int64[np.ndarray, " N"], rule: PackingRule) -> _Pieces:
    """Cut the stream of documents every ``row_tokens`` tokens, or where a row is at capacity."""
    ends_N1 = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int64)
    edges_R1 = _row_edges(ends_N1, rule)
    cuts = np.union1d(ends_N1, edges_R1)
    document_P = np.searchsorted(ends_N1, cuts[:-1], side="right") - 1
    row_P = np.searchsorted(edges_R1, cuts[:-1], side="right") - 1
    return _Pieces(document_P, cuts[:-1] - ends_N1[document_P], np.diff(cuts), row_P)


def _row_edges(ends_N1: Int64[np.ndarray, " N1"], rule: PackingRule) -> Int64[np.ndarray, " R1"]:
    """Return where rows begin in the stream, its end last."""
    total = int(ends_N1[-1])
    edges_R1 = np.append(np.arange(0, total, rule.row_tokens, dtype=np.int64), total)
    first_R = np.searchsorted(ends_N1, edges_R1[:-1], side="right") - 1
    last_R = np.searchsorted(ends_N1, edges_R1[1:], side="left") - 1
    if total == 0 or (last_R - first_R).max() < rule.max_documents:
        return edges_R1
    # A row at capacity moves every later edge, so edges have to be found one after the other.
    edges = array("q", [0])
    while edges[-1] < total:
        first = int(np.searchsorted(ends_N1, edges[-1], side="right")) - 1
        at_capacity = int(ends_N1[min(first + rule.max_documents, len(ends_N1) - 1)])
        edges.append(min(edges[-1] + rule.row_tokens, at_capacity))
    return np.frombuffer(edges, dtype=np.int64).copy()


def _best_fit(lengths_N: Int64[np.ndarray, " N"], rule: PackingRule) -> _Pieces:
    """Place pieces, longest first, each into the fullest row that has room for it."""
    pieces_N = -(-lengths_N // rule.row_tokens)
    document_P = np.repeat(np.arange(len(lengths_N)), pieces_N)
    ordinal_P = np.arange(len(document_P)) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)
    start_P = ordinal_P * rule.row_tokens
    length_P = np.minimum(lengths_N[document_P] - start_P, rule.row_tokens)
    longest_first_P = np.argsort(-length_P, kind="stable")
    row_P = np.empty(len(length_P), dtype=np.int64)
    row_P[longest_first_P] = _fullest_rows(length_P[longest_first_P], rule)
    # A stable sort by row leaves the pieces of a row in the shuffled order of their documents.
    by_row_P = np.argsort(row_P, kind="stable")
    return _Pieces(document_P[by_row_P], start_P[by_row_P], length_P[by_row_P], row_P[by_row_P])


def _fullest_rows(length_P: Int64[np.ndarray, " P"], rule: PackingRule) -> Int64[np.ndarray, " P"]:
    """Return the row of each piece under best fit.

    Open rows wait in a stack for each amount of free space; an integer with a bit for every
    stack that is not empty finds the smallest sufficient one in a few machine words.
    """
    waiting: list[list[int]] = [[] for _ in range(rule.row_tokens + 1)]
    nonempty = 0
    documents = array("q")
    row_P = array("q")
    for length in length_P.tolist():
        candidates = nonempty >> length
        if candidates:
            free = length + (candidates & -candidates).bit_length() - 1
            row = waiting[free].pop()
            if not waiting[free]:
                nonempty ^= 1 << free
        else:
            free, row = rule.row_tokens, len(documents)
            documents.append(0)
        documents[row] += 1
        row_P.append(row)
        left = free - length
        if left and documents[row] < rule.max_documents:
            waiting[left].append(row)
            nonempty |= 1 << left
    return np.array(row_P, dtype=np.int64)


def _count(
    lengths_N: Int64[np.ndarray, " N"],
    kept_N: Int64[np.ndarray, " K"],
    kept_lengths_N: Int64[np.ndarray, " K"],
    pieces: _Pieces,
    counts_R: Int64[np.ndarray, " R"],
    rule: PackingRule,
) -> PackingStatistics:
    packed_tokens = int(kept_lengths_N.sum())
    truncated = int((lengths_N[kept_N] - kept_lengths_N).sum())
    short_N = lengths_N < rule.min_document_tokens
    long_documents = int((lengths_N > rule.row_tokens).sum())
    cut_N = np.bincount(pieces.document_P, minlength=len(kept_N)) > 1
    used_R = np.bincount(pieces.row_P, weights=pieces.length_P, minlength=len(counts_R))
    closed_R = (counts_R >= rule.max_documents) & (used_R < rule.row_tokens)
    # A last row that ran out of documents at exactly its capacity lost nothing by it.
    closed_rows = int(closed_R[:-1].sum() if rule.packer == "concat" else closed_R.sum())
    return PackingStatistics(
        documents=len(lengths_N),
        tokens=int(lengths_N.sum()),
        row_tokens=rule.row_tokens,
        rows=len(counts_R),
        packed_tokens=packed_tokens,
        padding_tokens=len(counts_R) * rule.row_tokens - packed_tokens,
        long_documents=long_documents,
        cut_documents=int(cut_N.sum()),
        cut_that_fit_documents=int((cut_N & (kept_lengths_N <= rule.row_tokens)).sum()),
        truncated_tokens=truncated,
        dropped_long_documents=len(lengths_N) - len(kept_N) - int(short_N.sum()),
        dropped_short_documents=int(short_N.sum()),
        dropped_tokens=int(lengths_N.sum()) - packed_tokens - truncated,
        capacity_closed_rows=closed_rows,
        most_documents=int(counts_R.max(initial=0)),
    )
