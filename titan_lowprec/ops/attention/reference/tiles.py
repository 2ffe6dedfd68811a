"""Tiles of packed documents: which tokens form them and in which order pairs are visited."""

import itertools
from dataclasses import dataclass
from typing import cast

import torch

from titan_lowprec.formats.token_blocks import check_cu_seqlens
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Bool, Float, Int, Int32, Tensor


@dataclass(frozen=True, slots=True)
class PairStep:
    """Tile pairs that are computed at once; a query tile occurs at most once in a step."""

    q_tile_P: Int[Tensor, " P"]
    k_tile_P: Int[Tensor, " P"]


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles of all documents, zero-padded at each document's end, and the visible tile pairs.

    Tiles are counted from a document's first token and every product has the shape of a whole
    tile, so that a document's bits do not depend on where it lies or what lies beside it.
    """

    q_token_QT: Int[Tensor, "Q T"]
    """Token of each place of each query tile; ``total_tokens`` in the padding."""
    k_token_KS: Int[Tensor, "K S"]
    q_position_QT: Int[Tensor, "Q T"]
    """Position in the document; past its end in the padding."""
    k_position_KS: Int[Tensor, "K S"]
    k_length_K: Int[Tensor, " K"]
    """Tokens of the key tile's document."""
    documents: tuple[tuple[int, int], ...]
    """First token and length of every document that is not empty."""
    key_steps: tuple[PairStep, ...]
    """Step ``b`` pairs each query tile with the ``b``-th key tile of its document."""
    diagonal_steps: tuple[PairStep, ...]
    """Steps in which each key tile, too, occurs at most once."""


def plan_tiles(
    cu_seqlens_RM: Int32[Tensor, "R M1"], *, total_tokens: int, spec: AttentionSpec
) -> TilePlan:
    """Lay the documents of all rows out in tiles; reads the offsets on the host."""
    row_tokens = total_tokens // max(cu_seqlens_RM.shape[0], 1)
    offsets = cu_seqlens_RM.cpu()
    check_cu_seqlens(offsets, total_tokens=row_tokens)
    lines = cast(list[list[int]], offsets.tolist())  # pyright: ignore[reportUnknownMemberType]
    documents = tuple(
        (row * row_tokens + start, end - start)
        for row, line in enumerate(lines)
        for start, end in itertools.pairwise(line)
        if end > start
    )
    by_key: dict[int, list[tuple[int, int]]] = {}
    by_diagonal: dict[int, list[tuple[int, int]]] = {}
    first_q = first_k = 0
    for _, length in documents:
        q_tiles, k_tiles = -(-length // spec.tile_q), -(-length // spec.tile_k)
        for a in range(q_tiles):
            last_query = min((a + 1) * spec.tile_q, length) - 1
            visible = last_query // spec.tile_k + 1 if spec.mask == "causal" else k_tiles
            for b in range(visible):
                pair = (first_q + a, first_k + b)
                by_key.setdefault(b, []).append(pair)
                by_diagonal.setdefault(a - b, []).append(pair)
        first_q, first_k = first_q + q_tiles, first_k + k_tiles
    device = cu_seqlens_RM.device
    q_token_QT, q_position_QT, _ = _tile_tokens(documents, spec.tile_q, total_tokens, device)
    k_token_KS, k_position_KS, k_length_K = _tile_tokens(
        documents, spec.tile_k, total_tokens, device
    )
    return TilePlan(
        q_token_QT=q_token_QT,
        k_token_KS=k_token_KS,
        q_position_QT=q_position_QT,
        k_position_KS=k_position_KS,
        k_length_K=k_length_K,
        documents=documents,
        key_steps=_steps(by_key, device),
        diagonal_steps=_steps(by_diagonal, device),
    )


def _tile_tokens(
    documents: tuple[tuple[int, int], ...], tile: int, total_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    tiles = [
        (start, length, first) for start, length in documents for first in range(0, length, tile)
    ]
    table = torch.tensor(tiles, dtype=torch.int64).reshape(-1, 3)
    start_1, length_1, first_1 = table[:, :1], table[:, 1:2], table[:, 2:]
    position = first_1 + torch.arange(tile)
    token = torch.where(position < length_1, start_1 + position, total_tokens)
    return token.to(device), position.to(device), length_1[:, 0].to(device)


def _steps(pairs: dict[int, list[tuple[int, int]]], device: torch.device) -> tuple[PairStep, ...]:
    tables = [torch.tensor(pairs[key], device=device).T.contiguous() for key in sorted(pairs)]
    return tuple(PairStep(table[0], table[1]) for table in tables)


def gather_tiles(x_N: Tensor, token_QT: Int[Tensor, "Q T"], *, padding: float) -> Tensor:
    """Gather ``(N, heads, ...)`` into tiles ``(Q, heads, T, ...)``."""
    padded = torch.cat((x_N, torch.full_like(x_N[:1], padding)))
    return padded[token_QT].transpose(1, 2).contiguous()


def scatter_tiles(
    tiles: Float[Tensor, "Q H T *D"],
    token_QT: Int[Tensor, "Q T"],
    *,
    total_tokens: int,
    fill: float,
) -> Float[Tensor, "N H *D"]:
    """Write tiles back to their tokens; ``fill`` where no document lies."""
    values = tiles.transpose(1, 2)
    out = torch.full(
        (total_tokens + 1, *values.shape[2:]), fill, dtype=tiles.dtype, device=tiles.device
    )
    out[token_QT.reshape(-1)] = values.flatten(0, 1)
    return out[:total_tokens].clone()


def visible_mask(plan: TilePlan, step: PairStep, spec: AttentionSpec) -> Bool[Tensor, "P 1 1 T S"]:
    """Which keys of a pair's key tile each query sees.

    Queries in the padding see every key of the document: their rows stay finite and are dropped.
    """
    key_PS = plan.k_position_KS[step.k_tile_P]
    visible = (key_PS < plan.k_length_K[step.k_tile_P][:, None])[:, None, :]
    query_PT = plan.q_position_QT[step.q_tile_P]
    if spec.mask == "causal":
        visible = visible & (key_PS[:, None, :] <= query_PT[:, :, None])
    else:
        visible = visible.expand(-1, query_PT.shape[1], -1)
    return visible[:, None, None]
