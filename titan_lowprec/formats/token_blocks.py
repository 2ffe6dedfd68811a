"""Token blocks of packed rows: which document, position and scale block each token belongs to."""

from dataclasses import dataclass

import torch

from titan_lowprec.shapes import Int, Int32, Tensor

BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class TokenMetadata:
    """What each token of a packed row (or of several rows, one after the other) belongs to.

    Tokens past the last document have document id -1, position 0 and block index -1.
    """

    document_id_N: Int32[Tensor, " N"]
    """Document of the token, counted over the row's documents, empty ones included."""
    position_N: Int32[Tensor, " N"]
    """Position of the token in its document."""
    block_index_N: Int32[Tensor, " N"]
    """Index into the scale table: blocks of 32 tokens counted from each document's start."""
    num_blocks: Int32[Tensor, ""]
    """Blocks in use; a tensor, so that reading it is the caller's decision."""


def max_blocks(*, total_tokens: int, max_documents: int) -> int:
    """Bound the blocks of a packed row from sizes that are known without reading offsets.

    Numerics:
        Each nonempty document adds at most one partial block to ``total_tokens // 32``.

    Source:
        Counting: ``ceil(n / 32) <= (n + 31) / 32`` and ``ceil(n / 32) <= n``.
    """
    return min(total_tokens, (total_tokens + (BLOCK_TOKENS - 1) * max_documents) // BLOCK_TOKENS)


def token_metadata(cu_seqlens_M1: Int32[Tensor, " M1"], *, total_tokens: int) -> TokenMetadata:
    """Compute the metadata of one packed row from its document offsets.

    Args:
        cu_seqlens_M1: int32 document offsets on any device: first 0, never decreasing, at most
            ``total_tokens``. Not checked here, as that would wait for a device; see
            ``check_cu_seqlens``.
        total_tokens: Tokens in the row, a tail past the last document included.

    Returns:
        Metadata on the device of ``cu_seqlens_M1``, without a host sync.

    Numerics:
        Integers. A document of ``n`` tokens owns ``ceil(n / 32)`` consecutive blocks, so that no
        block spans two documents, wherever they start.

    Source:
        FLAMIA, arXiv:2611.03344 (32-token blocks); the confinement to documents is ours.
    """
    return row_metadata(cu_seqlens_M1.unsqueeze(0), row_tokens=total_tokens)


def row_metadata(cu_seqlens_RM: Int32[Tensor, "R M1"], *, row_tokens: int) -> TokenMetadata:
    """Compute the metadata of packed rows that lie one after the other.

    Args:
        cu_seqlens_RM: int32 document offsets of each row, relative to the row.
        row_tokens: Tokens in each row.

    Returns:
        Metadata of ``N = R * row_tokens`` tokens. Document ids run on over rows (row ``r`` starts
        at ``r * M``) and so do block indices: no two rows share a document id or a block.

    Numerics:
        Integers; no host sync.

    Source:
        As ``token_metadata``.
    """
    R, M1 = cu_seqlens_RM.shape
    M = M1 - 1
    device = cu_seqlens_RM.device
    if M == 0 or row_tokens == 0 or R == 0:
        empty = torch.full((R * row_tokens,), -1, dtype=torch.int32, device=device)
        return TokenMetadata(empty, torch.zeros_like(empty), empty.clone(), empty.new_zeros(()))
    token_RT = torch.arange(row_tokens, dtype=torch.int32, device=device).expand(R, -1).contiguous()
    ends_RM = cu_seqlens_RM[:, 1:].contiguous()
    document_RT = torch.searchsorted(ends_RM, token_RT, right=True)
    in_document_RT = document_RT < M
    slot_RT = document_RT.clamp(max=M - 1)
    position_RT = token_RT - cu_seqlens_RM.gather(1, slot_RT)

    blocks_RM = (cu_seqlens_RM.diff(dim=1) + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    table_end = blocks_RM.flatten().cumsum(0, dtype=torch.int32)
    first_block_RM = table_end.view(R, M) - blocks_RM
    block_RT = first_block_RM.gather(1, slot_RT) + position_RT // BLOCK_TOKENS

    row_start_R1 = torch.arange(R, device=device).unsqueeze(1) * M
    document_id_RT = (document_RT + row_start_R1).to(torch.int32)
    return TokenMetadata(
        document_id_N=torch.where(in_document_RT, document_id_RT, -1).flatten(),
        position_N=torch.where(in_document_RT, position_RT, 0).flatten(),
        block_index_N=torch.where(in_document_RT, block_RT, -1).flatten(),
        num_blocks=table_end[-1],
    )


def check_cu_seqlens(cu_seqlens: Int[Tensor, "*R M1"], *, total_tokens: int) -> None:
    """Check document offsets on the CPU, before they travel to a device.

    Args:
        cu_seqlens: Offsets of one row, or of a batch of rows.
        total_tokens: Tokens in a row.

    Raises:
        TypeError: The offsets are not int32, or not on the CPU.
        ValueError: They do not start at 0, decrease, or pass ``total_tokens``. Empty documents
            and a tail past the last one are legal.

    Numerics:
        Integers.

    Source:
        The ``cu_seqlens`` convention of variable-length attention kernels.
    """
    who = "check_cu_seqlens"
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{who}: offsets must be int32, got {cu_seqlens.dtype}; "
            "cast them with .to(torch.int32) where the row is packed"
        )
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"{who}: offsets must be on the CPU, got {cu_seqlens.device}; "
            "check the batch in the loader, before it is moved"
        )
    if cu_seqlens.shape[-1] == 0:
        raise ValueError(f"{who}: at least the offset 0 is required, got none; pass [0]")
    if cu_seqlens.numel() == 0:
        return
    first, last = cu_seqlens[..., 0], cu_seqlens[..., -1]
    if bool((first != 0).any()):
        raise ValueError(
            f"{who}: every row must start at 0, got a first offset of {int(first.abs().max())}; "
            "make offsets relative to their row"
        )
    steps = cu_seqlens.diff(dim=-1)
    if bool((steps < 0).any()):
        raise ValueError(
            f"{who}: offsets must never decrease, got a step of {int(steps.min())}; "
            "repeat the last offset for unused documents"
        )
    if bool((last > total_tokens).any()):
        raise ValueError(
            f"{who}: offsets must end at or before total_tokens={total_tokens}, "
            f"got {int(last.max())}; drop or truncate the document"
        )
