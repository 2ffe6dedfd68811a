"""Token metadata against a loop over documents."""

import itertools

import pytest
import torch

from titan_lowprec.formats.token_blocks import (
    BLOCK_TOKENS,
    check_cu_seqlens,
    max_blocks,
    row_metadata,
    token_metadata,
)

LAYOUTS = {
    "one": ([0, 64], 64),
    "ragged": ([0, 1, 32, 64, 97, 224, 352, 481], 481),
    "empty-first": ([0, 0, 0, 5], 5),
    "empty-middle": ([0, 33, 33, 33, 40], 40),
    "empty-last-and-tail": ([0, 31, 31, 31], 50),
    "only-tail": ([0, 0], 7),
    "no-documents": ([0], 7),
    "no-tokens": ([0, 0], 0),
    "single-tokens": (list(range(41)), 45),
}


def offsets(values: list[int] | list[list[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def by_loop(cu: list[int], total: int) -> tuple[list[int], list[int], list[int], int]:
    document, position, block = [-1] * total, [0] * total, [-1] * total
    first_block = 0
    for m, (start, end) in enumerate(itertools.pairwise(cu)):
        for t in range(start, end):
            document[t], position[t] = m, t - start
            block[t] = first_block + (t - start) // BLOCK_TOKENS
        first_block += -(-(end - start) // BLOCK_TOKENS)
    return document, position, block, first_block


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metadata_equals_a_loop_over_documents(layout: str, device: torch.device) -> None:
    cu, total = LAYOUTS[layout]
    metadata = token_metadata(offsets(cu, device), total_tokens=total)
    document, position, block, num_blocks = by_loop(cu, total)
    assert metadata.document_id_N.tolist() == document
    assert metadata.position_N.tolist() == position
    assert metadata.block_index_N.tolist() == block
    assert metadata.num_blocks.item() == num_blocks
    assert num_blocks <= max_blocks(total_tokens=total, max_documents=len(cu) - 1)
    for tensor in (metadata.document_id_N, metadata.position_N, metadata.block_index_N):
        assert (tensor.dtype, tensor.device.type) == (torch.int32, device.type)


def test_no_block_spans_two_documents_at_any_alignment(device: torch.device) -> None:
    for start in range(32):
        cu = [0, start, start + 70, start + 71, 140]
        metadata = token_metadata(offsets(cu, device), total_tokens=144)
        pairs = torch.stack((metadata.block_index_N, metadata.document_id_N), dim=1)[:140]
        blocks = pairs.unique(dim=0)[:, 0]
        assert len(blocks) == len(blocks.unique()) == metadata.num_blocks
        assert int(metadata.block_index_N[:140].bincount().max()) <= BLOCK_TOKENS


def test_rows_share_neither_documents_nor_blocks(device: torch.device) -> None:
    rows = [[0, 3, 40, 40], [0, 0, 0, 0], [0, 48, 48, 48]]
    metadata = row_metadata(offsets(rows, device), row_tokens=48)
    shift = 0
    for r, cu in enumerate(rows):
        document, position, block, num_blocks = by_loop(cu, 48)
        row = slice(48 * r, 48 * (r + 1))
        assert metadata.document_id_N[row].tolist() == [
            d + 3 * r if d >= 0 else -1 for d in document
        ]
        assert metadata.position_N[row].tolist() == position
        assert metadata.block_index_N[row].tolist() == [b + shift if b >= 0 else -1 for b in block]
        shift += num_blocks
    assert metadata.num_blocks.item() == shift


def test_repeated_final_offsets_change_no_token(device: torch.device) -> None:
    short = token_metadata(offsets([0, 10, 50], device), total_tokens=60)
    padded = token_metadata(offsets([0, 10, 50, 50, 50, 50], device), total_tokens=60)
    assert torch.equal(short.document_id_N, padded.document_id_N)
    assert torch.equal(short.block_index_N, padded.block_index_N)
    assert torch.equal(short.num_blocks, padded.num_blocks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_metadata_on_a_device_waits_for_nothing() -> None:
    cu = torch.tensor([[0, 5, 9], [0, 9, 9]], dtype=torch.int32, device="cuda")
    expected = row_metadata(cu.cpu(), row_tokens=12)
    row_metadata(cu, row_tokens=12)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = row_metadata(cu, row_tokens=12)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(actual.block_index_N.cpu(), expected.block_index_N)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_legal_offsets_pass(layout: str) -> None:
    cu, total = LAYOUTS[layout]
    check_cu_seqlens(offsets(cu, torch.device("cpu")), total_tokens=total)
    check_cu_seqlens(offsets([cu, cu], torch.device("cpu")), total_tokens=total)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 5], "every row must start at 0, got a first offset of 1"),
        ([0, 5, 4], "must never decrease, got a step of -1"),
        ([0, 11], "must end at or before total_tokens=10, got 11"),
        ([[0, 5], [0, 12]], "must end at or before total_tokens=10, got 12"),
        ([], "at least the offset 0 is required"),
    ],
)
def test_illegal_offsets_are_refused(values: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens(torch.tensor(values, dtype=torch.int32), total_tokens=10)


def test_offsets_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="must be int32, got"):
        check_cu_seqlens(torch.tensor([0, 5]), total_tokens=10)
