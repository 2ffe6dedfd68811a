"""Work items: units of tokens of packed documents, listed on the device."""

from collections.abc import Sequence

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
def _list_units(
    cu_ptr, items_ptr, DOCUMENTS, M1, row_tokens, capacity,
    UNIT: tl.constexpr, ORDER: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Some slots of one list: find each slot's document, then the item's rank."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    passed = tl.zeros([SLOTS, CHUNK], tl.int32)  # documents that end before the slot
    units_passed = passed
    blocks_passed = passed
    plain_units = tl.zeros([CHUNK], tl.int32)
    total = tl.sum(plain_units, 0)
    total_blocks = total
    for g0 in range(0, DOCUMENTS, CHUNK):
        g = g0 + tl.arange(0, CHUNK)
        _, n, is_tail, count = _units(cu_ptr, g, DOCUMENTS, M1, row_tokens, UNIT)
        blocks = (n + 31) // 32
        until = total + tl.cumsum(count, 0)
        blocks_until = total_blocks + tl.cumsum(blocks, 0)
        ended = until[None, :] <= slot[:, None]
        passed += ended.to(tl.int32)
        units_passed = tl.maximum(units_passed, tl.where(ended, until[None, :], 0))
        blocks_passed = tl.maximum(blocks_passed, tl.where(ended, blocks_until[None, :], 0))
        plain_units += tl.where(is_tail, 0, count)
        total += tl.sum(count, 0)
        total_blocks += tl.sum(blocks, 0)
    used = slot < total
    document = tl.where(used, tl.sum(passed, 1), DOCUMENTS)
    start, length, tail, units = _units(cu_ptr, document, DOCUMENTS, M1, row_tokens, UNIT)
    unit = slot - tl.where(used, tl.max(units_passed, 1), total)
    rank = slot
    if ORDER != "document":
        cost = units
        if ORDER == "queries":
            cost = unit + 1
        if ORDER == "keys":
            cost = units - unit
        ahead = tl.zeros([SLOTS, CHUNK], tl.int32)
        for g0 in range(0, DOCUMENTS, CHUNK):
            g = g0 + tl.arange(0, CHUNK)
            _, _, is_tail, count = _units(cu_ptr, g, DOCUMENTS, M1, row_tokens, UNIT)
            plain = tl.where(is_tail, 0, count)[None, :]
            earlier = g[None, :] < document[:, None]
            if ORDER == "full":
                larger = tl.where(plain > cost[:, None], plain, 0)
                ties = tl.where(earlier & (plain == cost[:, None]), plain, 0)
            else:
                larger = tl.maximum(plain - cost[:, None], 0)
                ties = (earlier & (plain >= cost[:, None])).to(tl.int32)
            tail_ties = tl.where(earlier & is_tail[None, :], count[None, :], 0)
            ahead += tl.where(tail[:, None], tail_ties, larger + ties)
        rank = tl.sum(ahead, 1)
        if ORDER == "full":
            rank += unit
        rank += tl.where(tail, tl.sum(plain_units, 0), 0)
        if ORDER != "full":
            rank += tl.where(tail, unit, 0)
        rank = tl.where(used, rank, slot)
    out = items_ptr + rank * 4
    inside = slot < capacity
    tl.store(out, tl.where(used, start, 0), mask=inside)
    tl.store(out + 1, tl.where(used, tl.where(tail, -length, length), 0), mask=inside)
    tl.store(out + 2, unit, mask=inside)
    tl.store(out + 3, tl.where(used, tl.max(blocks_passed, 1), 0), mask=inside)


@triton.jit
def _work_lists(
    cu_ptr, items0_ptr, items1_ptr, items2_ptr, DOCUMENTS, M1, row_tokens,
    capacity0, capacity1, capacity2,
    UNIT0: tl.constexpr, UNIT1: tl.constexpr, UNIT2: tl.constexpr,
    ORDER0: tl.constexpr, ORDER1: tl.constexpr, ORDER2: tl.constexpr,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (i, n): slots i of list n."""
    which = tl.program_id(1)
    if which == 0:
        _list_units(
            cu_ptr, items0_ptr, DOCUMENTS, M1, row_tokens, capacity0, UNIT0, ORDER0, CHUNK, SLOTS
        )
    elif which == 1:
        _list_units(
            cu_ptr, items1_ptr, DOCUMENTS, M1, row_tokens, capacity1, UNIT1, ORDER1, CHUNK, SLOTS
        )
    else:
        _list_units(
            cu_ptr, items2_ptr, DOCUMENTS, M1, row_tokens, capacity2, UNIT2, ORDER2, CHUNK, SLOTS
        )


def work_lists(
    cu_seqlens_RM: Int32[Tensor, "R M1"], *, total_tokens: int, lists: Sequence[tuple[int, str]]
) -> list[Int32[Tensor, "items 4"]]:
    """List units of tokens of all documents, on the device and without a host sync.

    Args:
        cu_seqlens_RM: Document offsets of each row, relative to the row.
        total_tokens: Tokens of all rows together.
        lists: One to three lists, made at once; of each its unit and its order. Unit: tokens,
            counted from the start of each document. Order: ``document``: as they lie. The others
            put the longest work first: ``queries`` and ``keys`` for units of queries and keys
            under a causal mask, ``full`` without one.

    Returns:
        ``ITEM_FIELDS`` numbers an item, for as many items as any layout of these sizes needs
        (each document and each tail adds at most one partial unit). Tails (tokens past a row's
        last document) come as documents of negative length, after all others unless the order is
        ``document``; unused slots have length 0 and count on from 0 in the third field.

    Raises:
        ValueError: There are no lists, or more than three.

    Numerics:
        Integers. An item's rank counts the items of more work and the equal ones before it, so
        the order is a function of the offsets alone.

    Source:
        arXiv:2611.03344, section 3.6 and appendix B.6 (longest first over the whole batch).
    """
    if not 1 <= len(lists) <= 3:
        raise ValueError(f"lists must be one to three, got {len(lists)}")
    R, M1 = cu_seqlens_RM.shape
    made = []
    for unit, order in lists:
        capacity = total_tokens // unit + R * M1 + (TILE_BLOCKS if order == "document" else 0)
        made.append(cu_seqlens_RM.new_empty((capacity, ITEM_FIELDS)))
    three = [min(n, len(lists) - 1) for n in range(3)]  # no program makes those past the last
    capacities = [made[n].shape[0] for n in three]
    units, orders = zip(*(lists[n] for n in three), strict=True)
    _work_lists[(triton.cdiv(max(capacities), _ITEMS_PER_PROGRAM), len(lists))](
        cu_seqlens_RM, *(made[n] for n in three), R * M1, M1, total_tokens // max(R, 1),
        *capacities,
        UNIT0=units[0], UNIT1=units[1], UNIT2=units[2],
        ORDER0=orders[0], ORDER1=orders[1], ORDER2=orders[2],
        CHUNK=_DOCUMENT_CHUNK, SLOTS=_ITEMS_PER_PROGRAM,
    )  # fmt: skip
    return made
