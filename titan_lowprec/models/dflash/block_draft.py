"""A draft model that decodes: keys and values of the context are computed once."""

from collections.abc import Iterator
from typing import cast

import torch

from titan_lowprec.models.dflash.model import DraftLayer, DraftModel, RotaryTable, rotary_table
from titan_lowprec.models.dflash.tables import FrozenTables
from titan_lowprec.shapes import Float, Int64, Tensor


class BlockDraft:
    """Drafts ``block_tokens - 1`` tokens of one sequence with a draft model.

    The context enters every layer as it is (no layer changes it), so its keys and values are those
    of training, whenever they are computed. A block sees all of them and itself; its own are not
    kept. Attention is the reference.
    """

    def __init__(self, model: DraftModel, tables: FrozenTables, *, capacity: int) -> None:
        """Reserve room.

        Args:
            model: The draft.
            tables: The target's embedding and head.
            capacity: Longest context, a block included.
        """
        args, like = model.args, model.fc.weight
        self.model, self.tables, self.capacity = model, tables, capacity
        self.length = 0
        shape = (args.layers, 2, 1, args.kv_heads, capacity, args.head_dim)
        self._cache = like.new_empty(shape)

    def reset(self) -> None:
        """Forget the sequence."""
        self.length = 0

    @torch.no_grad()
    def propose(
        self, tokens_S: Int64[Tensor, " S"], features_NO: Float[Tensor, "N O"]
    ) -> Int64[Tensor, " P1"]:
        """Draft what follows ``tokens_S`` from features of its tokens that were not given before.

        Raises:
            ValueError: Features and tokens are shifted, or there are more than the capacity.
        """
        args, context = self.model.args, self.length + features_NO.shape[0]
        if tokens_S.shape[0] != context + 1:
            raise ValueError(
                f"BlockDraft: all tokens but the last must have features, got "
                f"{tokens_S.shape[0]} tokens and {context} features; they must not be shifted"
            )
        if context + args.block_tokens > self.capacity:
            raise ValueError(
                f"BlockDraft: context and block must have at most {self.capacity} tokens, got "
                f"{context} and {args.block_tokens}; raise the capacity"
            )
        self._absorb(features_NO)
        input_P = torch.full((args.block_tokens,), args.mask_id, device=tokens_S.device)
        input_P[0] = tokens_S[-1]
        hidden_PE = self._block(self.tables.embed(input_P)[None])[0]
        return self.tables.logits(hidden_PE[1:]).argmax(-1)

    def _absorb(self, features_NO: Float[Tensor, "N O"]) -> None:
        end = self.length + features_NO.shape[0]
        rotary = self._rotary(self.length, end)
        context_BNE = self.model.context(features_NO[None])
        for layer, cache in self._layers():
            k, v = layer.self_attn.keys_values(context_BNE, rotary)
            cache[0, :, :, self.length : end], cache[1, :, :, self.length : end] = k, v
        self.length = end

    def _block(self, x_BPE: Float[Tensor, "B P E"]) -> Float[Tensor, "B P E"]:
        P = x_BPE.shape[1]
        end = self.length + P
        rotary = self._rotary(self.length, end)
        mask = torch.ones(1, P, end, dtype=torch.bool, device=x_BPE.device)
        for layer, cache in self._layers():
            normed = layer.input_layernorm(x_BPE)
            k, v = layer.self_attn.keys_values(normed, rotary)
            cache[0, :, :, self.length : end], cache[1, :, :, self.length : end] = k, v
            keys, values = cache[:, :, :, :end]
            out = layer.self_attn.attend(normed, rotary, keys, values, mask, "reference")
            x_BPE = layer.feed_forward(x_BPE + out)
        return self.model.norm(x_BPE)

    def _layers(self) -> Iterator[tuple[DraftLayer, Tensor]]:
        return zip(cast(list[DraftLayer], self.model.layers), self._cache, strict=True)

    def _rotary(self, begin: int, end: int) -> RotaryTable:
        args = self.model.args
        position = torch.arange(begin, end, device=self._cache.device)
        return rotary_table(position[None], head_dim=args.head_dim, theta=args.rope_theta)
