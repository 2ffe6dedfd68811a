"""Work items: units of tokens of packed documents, listed on the device."""

import torch
import triton
import triton.language as tl

from titan_lowprec.shapes import Int32, Tensor

ITEM_FIELDS = 4
"""int32 fields of a work item: first token of the document, its length (negative in a tail),
index of the unit in the document, number of token blocks before the document."""

TILE_BLOCKS = 4
"""Token blocks of the largest tile; transposed codes keep that many spare blocks at the end."""

_DOCUMENT_CHUNK = 256
_ITEMS_PER_PROGRAM = 16


@triton.jit
def _units(cu_ptr, g, DOCUMENTS, M1, row_tokens, UNIT: tl.constexpr):
    """First token, length, tail flag and number of units of documents g; tails come last."""
    inside = g < DOCUMENTS
    row = g // M1
    m = g % M1
    tail = m == M1 - 1
    first = tl.load(cu_ptr + row * M1 + m, mask=inside, other=0)
    last = tl.load(cu_ptr + row * M1 + m + 1, mask=inside & (m < M1 - 1), other=0)
    last = tl.where(tail, row_tokens, last)
    length = tl.where(inside, last - first, 0)
    return first + row * row_tokens, length, tail, (length + UNIT - 1) // UNIT


@triton.jit
def _work_items(
    cu_ptr,
    items_ptr,
    DOCUMENTS,
    M1,
    row_tokens,
    capacity,
    UNIT: tl.constexpr,
    ORDER: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    zero = tl.zeros([SLOTS], tl.int32)
    start, length, unit, base, units, document = zero, zero, zero, zero, zero, zero
    tail = zero
    total = tl.sum(tl.zeros([CHUNK], tl.int32), 0)
    blocks_before = total
    full_units = total
    for g0 in range(0, DOCUMENTS, CHUNK):
        g = g0 + tl.arange(0, CHUNK)
        first, n, is_tail, count = _units(cu_ptr, g, DOCUMENTS, M1, row_tokens, UNIT)
        blocks = (n + 31) // 32
        until = total + tl.cumsum(count, 0)
        before = until - count
        block_base = blocks_before + tl.cumsum(blocks, 0) - blocks
        hit = (slot[:, None] >= before[None, :]) & (slot[:, None] < until[None, :])
        hit = hit.to(tl.int32)  # [SLOTS, CHUNK]
        start += tl.sum(hit * first[None, :], 1)
        length += tl.sum(hit * n[None, :], 1)
        unit += tl.sum(hit * (slot[:, None] - before[None, :]), 1)
        base += tl.sum(hit * block_base[None, :], 1)
        units += tl.sum(hit * count[None, :], 1)
        document += tl.sum(hit * g[None, :], 1)
        tail += tl.sum(hit * is_tail.to(tl.int32)[None, :], 1)
        total += tl.sum(count, 0)
        blocks_before += tl.sum(blocks, 0)
        full_units += tl.sum(tl.where(is_tail, 0, count), 0)
    rank = slot
    if ORDER != "document":
        cost = units
        if ORDER == "queries":
            cost = unit + 1
        if ORDER == "keys":
            cost = units - unit
        rank = tl.where(tail == 1, full_units + unit, zero)
        if ORDER == "full":
            rank += tl.where(tail == 1, 0, unit)
        for g0 in range(0, DOCUMENTS, CHUNK):
            g = g0 + tl.arange(0, CHUNK)
            first, n, is_tail, count = _units(cu_ptr, g, DOCUMENTS, M1, row_tokens, UNIT)
            plain = tl.where(is_tail, 0, count)[None, :]
            earlier = g[None, :] < document[:, None]
            if ORDER == "full":
                larger = tl.where(plain > cost[:, None], plain, 0)
                ties = tl.where(earlier & (plain == cost[:, None]), plain, 0)
            else:
                larger = tl.maximum(plain - cost[:, None], 0)
                ties = (earlier & (plain >= cost[:, None])).to(tl.int32)
            tail_ties = tl.where(earlier & is_tail[None, :], count[None, :], 0)
            ahead = tl.where((tail == 1)[:, None], tail_ties, larger + ties)
            rank += tl.sum(ahead, 1)
    used = slot < total
    rank = tl.where(used, rank, slot)
    unit = tl.where(used, unit, slot - total)
    length = tl.where(tail == 1, -length, length)
    out = items_ptr + rank * 4
    inside = slot < capacity
    tl.store(out, start, mask=inside)
    tl.store(out + 1, length, mask=inside)
    tl.store(out + 2, unit, mask=inside)
    tl.store(out + 3, base, mask=inside)


def work_items(
    cu_seqlens_RM: Int32[Tensor, "R M1"], *, total_tokens: int, unit: int, order: str
) -> Int32[Tensor, "items 4"]:
    """List units of ``unit`` tokens of all documents, on the device and without a host sync.

    Args:
        cu_seqlens_RM: Document offsets of each row, relative to the row.
        total_tokens: Tokens of all rows together.
        unit: Tokens of a unit, counted from the start of each document.
        order: ``document``: as they lie. The others put the longest work first: ``queries`` and
            ``keys`` for units of queries and keys under a causal mask, ``full`` without one.

    Returns:
        ``ITEM_FIELDS`` numbers an item, for as many items as any layout of these sizes needs
        (each document and each tail adds at most one partial unit). Tails (tokens past a row's
        last document) come as documents of negative length, after all others unless the order is
        ``document``; unused slots have length 0 and count on from 0 in the third field.

    Numerics:
        Integers. An item's rank counts the items of more work and the equal ones before it, so
        the order is a function of the offsets alone.

    Source:
        arXiv:2611.03344, section 3.6 and appendix B.6 (longest first over the whole batch).
    """
    R, M1 = cu_seqlens_RM.shape
    capacity = total_tokens // unit + R * M1 + (TILE_BLOCKS if order == "document" else 0)
    items = torch.empty((capacity, ITEM_FIELDS), dtype=torch.int32, device=cu_seqlens_RM.device)
    _work_items[(triton.cdiv(capacity, _ITEMS_PER_PROGRAM),)](
        cu_seqlens_RM,
        items,
        R * M1,
        M1,
        total_tokens // max(R, 1),
        capacity,
        UNIT=unit,
        ORDER=order,
        CHUNK=_DOCUMENT_CHUNK,
        SLOTS=_ITEMS_PER_PROGRAM,
    )
    return items
