"""What a block is made of: input tokens, positions, labels, and which labels count."""

from dataclasses import dataclass

import torch

from titan_lowprec.models.dflash.anchors import Anchors
from titan_lowprec.models.dflash.args import DFlashArgs
from titan_lowprec.shapes import Bool, Float32, Int, Int64, Tensor

IGNORE_INDEX = -100
"""Label of a token without a loss."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tokens of all blocks of every row, ``P`` for each anchor slot, block after block."""

    input_BT: Int64[Tensor, "B T"]
    """The true token at the anchor, then mask tokens."""
    position_BT: Int64[Tensor, "B T"]
    """Position in the anchor's document."""
    label_BT: Int64[Tensor, "B T"]
    """The token at the same index, not shifted; -100 where it does not count."""
    decay_BT: Float32[Tensor, "B T"]
    """Weight by the paper's decay, 0 where the label does not count."""
    block_tokens: int

    @property
    def valid_BAP(self) -> Bool[Tensor, "B A P"]:
        """Which labels count, by block."""
        return (self.label_BT != IGNORE_INDEX).unflatten(1, (-1, self.block_tokens))


def draft_blocks(
    tokens_BS: Int64[Tensor, "B S"],
    *,
    loss_mask_BS: Bool[Tensor, "B S"],
    document_BS: Int[Tensor, "B S"],
    position_BS: Int64[Tensor, "B S"],
    anchors: Anchors,
    args: DFlashArgs,
) -> Blocks:
    """Lay out the blocks of a batch.

    Slot ``k`` of a block at anchor ``a`` stands for token ``a + k``. It counts if the slot is
    used, ``k >= 1``, ``a + k`` is in the row and in the anchor's document, and the token is one
    to be learned; its decay is ``exp(-(k - 1) / gamma)``.

    Args:
        tokens_BS: Token ids, not shifted.
        loss_mask_BS: Tokens that the draft should learn to produce.
        document_BS: Document of each token.
        position_BS: Position of each token in its document.
        anchors: Of the same rows.
        args: Block size, mask token and decay.
    """
    S, P = tokens_BS.shape[1], args.block_tokens
    offset_P = torch.arange(P, device=tokens_BS.device)
    index_BAP = anchors.position_BA[..., None] + offset_P
    inside_BT = index_BAP.clamp(max=S - 1).flatten(1)

    def at(x_BS: Tensor, index: Tensor) -> Tensor:
        return x_BS.gather(1, index)

    anchor_document_BA = at(document_BS, anchors.position_BA)
    same = at(document_BS, inside_BT).unflatten(1, (-1, P)) == anchor_document_BA[..., None]
    learned = at(loss_mask_BS, inside_BT).unflatten(1, (-1, P))
    counts = anchors.keep_BA[..., None] & (offset_P >= 1) & (index_BAP < S) & same & learned
    counts_BT = counts.flatten(1)
    input_BAP = torch.full_like(index_BAP, args.mask_id)
    input_BAP[..., 0] = at(tokens_BS, anchors.position_BA)
    position_BAP = at(position_BS, anchors.position_BA)[..., None] + offset_P
    decay_P = torch.exp(-(offset_P - 1).float() / args.gamma)
    return Blocks(
        input_BT=input_BAP.flatten(1),
        position_BT=position_BAP.flatten(1),
        label_BT=at(tokens_BS, inside_BT).masked_fill(~counts_BT, IGNORE_INDEX),
        decay_BT=(counts * decay_P).flatten(1),
        block_tokens=P,
    )
