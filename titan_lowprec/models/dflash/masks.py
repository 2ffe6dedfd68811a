"""Which keys a drafted token may see, as one predicate for a dense mask and FlexAttention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import no_type_check

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from titan_lowprec.models.dflash.anchors import Anchors
from titan_lowprec.shapes import Bool, Int, Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
FLEX_BLOCK = 128
"""Queries and keys of a block of FlexAttention's sparse masks."""


@dataclass(frozen=True, slots=True)
class DraftMask:
    """Token ``k`` of block ``j`` sees its document's context before the anchor, and its block.

    Queries are the tokens of all blocks, ``A * P`` of them; keys are the ``S`` context tokens and
    then the blocks' own. The context is strictly before the anchor: the anchor's feature does not
    exist yet when a draft is made. Blocks never see each other, and an unused slot sees nothing.
    """

    anchors: Anchors
    document_BS: Int[Tensor, "B S"]
    block_tokens: int

    @property
    def queries(self) -> int:
        """Tokens of all blocks of a row."""
        return self.anchors.position_BA.shape[1] * self.block_tokens

    @property
    def keys(self) -> int:
        """Context tokens and tokens of all blocks."""
        return self.document_BS.shape[1] + self.queries

    def predicate(self) -> MaskMod:
        """Return the rule in FlexAttention's signature: ``(row, head, query, key) -> allowed``.

        Indices broadcast and heads do not matter. FlexAttention evaluates whole blocks, so that
        indices past the last query or key do occur: they are read inside the tensors, and denied.
        """
        position_BA, keep_BA = self.anchors.position_BA, self.anchors.keep_BA
        document_BS, P = self.document_BS, self.block_tokens
        queries, keys = self.queries, self.keys
        (B, A), S = position_BA.shape, document_BS.shape[1]

        @no_type_check  # FlexAttention traces it and counts its parameters
        def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row, block = b.clamp(0, B - 1), query // P
            slot = block.clamp(0, A - 1)
            own = (key >= S) & ((key - S) // P == block)
            seen = own
            if S > 0:
                anchor = position_BA[row, slot]
                # A block that is drafted at decode time begins past the last context token.
                document = document_BS[row, anchor.clamp(0, S - 1)]
                same = document_BS[row, key.clamp(0, S - 1)] == document
                seen = own | ((key < S) & (key < anchor) & same)
            return seen & keep_BA[row, slot] & (query < queries) & (key < keys)

        return allowed

    def dense(self) -> Bool[Tensor, "B T K"]:
        """Return the mask of every query and key, without an axis for heads."""
        device = self.document_BS.device
        row = torch.arange(self.document_BS.shape[0], device=device)[:, None, None]
        query = torch.arange(self.queries, device=device)[:, None]
        return self.predicate()(row, row, query, torch.arange(self.keys, device=device))

    def visible_share(self) -> float:
        """Return the share of all keys that a query of a used slot sees, on average.

        It is counted for each anchor, so that no mask of every query and key is needed.
        """
        position_BA, keep_BA = self.anchors.position_BA, self.anchors.keep_BA
        token_S = torch.arange(self.document_BS.shape[1], device=self.document_BS.device)
        document_BA = self.document_BS.gather(1, position_BA)
        same = self.document_BS[:, None] == document_BA[..., None]
        context_BA = (same & (token_S < position_BA[..., None])).sum(-1)
        seen = context_BA[keep_BA].double() + self.block_tokens
        return float(seen.mean() / self.keys)

    def block_sparse(self) -> BlockMask:
        """Return FlexAttention's form of the mask, one for all heads."""
        return create_block_mask(
            self.predicate(),
            B=self.document_BS.shape[0],
            H=None,
            Q_LEN=self.queries,
            KV_LEN=self.keys,
            device=str(self.document_BS.device),
            BLOCK_SIZE=FLEX_BLOCK,
        )
