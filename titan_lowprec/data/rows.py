"""One packed row as tensors: ids, labels, positions and the metadata that kernels need."""

from dataclasses import dataclass

import numpy as np
import torch

from titan_lowprec.data.manifest import TokenStore
from titan_lowprec.data.pack import PackingIndex
from titan_lowprec.formats.token_blocks import token_metadata
from titan_lowprec.shapes import Int32, Int64, Tensor

IGNORE_INDEX = -100
"""Label of a token that predicts nothing, as PyTorch and TorchTitan have it."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Documents one after the other, then a tail of padding when they do not fill the row."""

    tokens_T: Int64[Tensor, " T"]
    labels_T: Int64[Tensor, " T"]
    """The document's next token; -100 for a document's last token and for the tail."""
    positions_T: Int64[Tensor, " T"]
    """Position in the document; 0 in the tail."""
    document_ids_T: Int32[Tensor, " T"]
    """Document of the row; -1 in the tail."""
    cu_seqlens_M1: Int32[Tensor, " M1"]
    """Where documents begin; the last one's end is repeated up to the fixed capacity."""
    block_index_T: Int32[Tensor, " T"]
    """32-token scale block of the row, none across documents; -1 in the tail."""


def assemble_row(
    store: TokenStore,
    index: PackingIndex,
    row: int,
    *,
    row_tokens: int,
    max_documents: int,
    pad_id: int,
) -> PackedRow:
    """Read the documents of one row of an index."""
    pieces = slice(int(index.first_piece_R1[row]), int(index.first_piece_R1[row + 1]))
    ends_P = np.cumsum(index.length_P[pieces])
    tokens_T = np.full(row_tokens, pad_id, dtype=np.int64)
    first_P = store.offset_M1[index.document_P[pieces]] + index.start_P[pieces]
    begin = 0
    for first, end in zip(first_P.tolist(), ends_P.tolist(), strict=True):
        tokens_T[begin:end] = store.tokens_N[first : first + end - begin]
        begin = end
    labels_T = np.full(row_tokens, IGNORE_INDEX, dtype=np.int64)
    labels_T[: max(0, begin - 1)] = tokens_T[1 : max(1, begin)]
    labels_T[ends_P - 1] = IGNORE_INDEX
    cu_seqlens_M1 = np.full(max_documents + 1, begin, dtype=np.int32)
    cu_seqlens_M1[0] = 0
    cu_seqlens_M1[1 : len(ends_P) + 1] = ends_P
    return _with_metadata(tokens_T, labels_T, cu_seqlens_M1)


def ignored_row(*, row_tokens: int, max_documents: int, pad_id: int) -> PackedRow:
    """Return a row without documents: every label is ignored."""
    return _with_metadata(
        np.full(row_tokens, pad_id, dtype=np.int64),
        np.full(row_tokens, IGNORE_INDEX, dtype=np.int64),
        np.zeros(max_documents + 1, dtype=np.int32),
    )


def _with_metadata(
    tokens_T: np.ndarray, labels_T: np.ndarray, cu_seqlens_M1: np.ndarray
) -> PackedRow:
    offsets_M1 = torch.from_numpy(cu_seqlens_M1)
    metadata = token_metadata(offsets_M1, total_tokens=len(tokens_T))
    return PackedRow(
        tokens_T=torch.from_numpy(tokens_T),
        labels_T=torch.from_numpy(labels_T),
        positions_T=metadata.position_N.long(),
        document_ids_T=metadata.document_id_N,
        cu_seqlens_M1=offsets_M1,
        block_index_T=metadata.block_index_N,
    )
