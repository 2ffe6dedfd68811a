"""A target that keeps keys and values, so that it computes each token once."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torchtitan.models.qwen3.model.model import apply_rotary_emb as rotate_qwen3

from titan_lowprec.models.dflash.decode import TargetStep
from titan_lowprec.ops.attention.common import operand_dtype, score_factor
from titan_lowprec.ops.attention.reference.casts import round_plain
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float, Int64, Tensor
from titan_lowprec.titan.dflash.target import FrozenTarget
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.llama3.rotary import rotate, rotation_of

CacheAttention = Literal["recipe", "pytorch"]
"""``recipe``: with the roundings of the target's own attention, the same up to the order of sums.
``pytorch``: SDPA in the target's type, faster; tokens that ties in rounding decide may differ from
the target's."""


class CachedTarget:
    """A target that reads sequences of equal length piece by piece, all rows at once."""

    def __init__(
        self, target: FrozenTarget, *, rows: int, capacity: int, attention: CacheAttention
    ) -> None:
        """Reserve room.

        Args:
            target: The target.
            rows: Sequences.
            capacity: Longest sequence.
            attention: See `CacheAttention`.

        Raises:
            ValueError: The capacity is more than the target's positions, or ``recipe`` is asked
                for and quantises keys and values.
        """
        if capacity > target.max_positions:
            raise ValueError(
                f"CachedTarget: prompt and answer must have at most {target.max_positions} tokens, "
                f"got {capacity}; shorten them, or raise training.seq_len"
            )
        self.target, self.model = target, target.module.model
        self.length, self.capacity = 0, capacity
        self.attention: CacheAttention = attention
        if attention == "recipe":
            for layer in self.model.layers.values():
                check_cacheable(layer.attention.spec)
        llama = isinstance(self.model, LowprecLlama)
        self._rotate: Any = rotate_llama if llama else rotate_qwen3
        self._rope: Tensor = self.model.freqs_cis if llama else self.model.rope_cache
        shape = target.tables.embed_VE
        self._cache = [
            shape.new_empty(2, rows, capacity, *self._kv_shape(layer))
            for layer in self.model.layers.values()
        ]

    def _kv_shape(self, layer: Any) -> tuple[int, int]:
        D: int = layer.attention.head_dim
        return layer.attention.wk.weight.shape[0] // D, D

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first ``length``."""
        if not 0 <= length <= self.length:
            raise ValueError(
                f"CachedTarget: it has read {self.length} tokens and cannot go to {length}; "
                "extend it first"
            )
        self.length = length

    def extend(self, tokens_S: Int64[Tensor, " S"], *, predictions: int) -> TargetStep:
        """Read tokens of a single row; logits of the last ``predictions``, and all features."""
        hidden_BSE, features_BSO = self._read(tokens_S[None])
        logits = self.target.tables.logits(hidden_BSE[0, -predictions:])
        return TargetStep(logits, features_BSO[0])

    def next_logits(self, tokens_BS: Int64[Tensor, "B S"]) -> Float[Tensor, "B V"]:
        """Read tokens of every row and return the logits of what follows the last one."""
        return self.target.tables.logits(self._read(tokens_BS)[0][:, -1])

    @torch.no_grad()
    def _read(self, tokens_BS: Int64[Tensor, "B S"]) -> tuple[Tensor, Tensor]:
        """Normed hidden states and taps of new tokens."""
        end = self.length + tokens_BS.shape[1]
        if end > self.capacity:
            raise ValueError(
                f"CachedTarget: there is room for {self.capacity} tokens, got {end}; "
                "raise the capacity"
            )
        position = torch.arange(self.length, end, device=tokens_BS.device)
        position_BS = position.expand(tokens_BS.shape)
        h = self.model.tok_embeddings(tokens_BS)
        tapped: dict[int, Tensor] = {}
        for number, layer in enumerate(self.model.layers.values()):
            h = h + self._attend(layer.attention, layer.attention_norm(h), number, position_BS)
            h = h + layer.feed_forward(layer.ffn_norm(h))
            if number in self.target.taps:
                tapped[number] = h
        self.length = end
        features = torch.cat([tapped[number] for number in self.target.taps], dim=-1)
        return self.model.norm(h), features

    def _attend(self, attention: Any, x: Tensor, number: int, position_BT: Tensor) -> Tensor:
        B, T, _ = x.shape
        D = attention.head_dim
        q, k, v = (w(x).view(B, T, -1, D) for w in (attention.wq, attention.wk, attention.wv))
        if getattr(attention, "q_norm", None) is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = self._rotate(q, k, self._rope, position_BT)
        cache, end = self._cache[number], self.length + T
        cache[0, :, self.length : end], cache[1, :, self.length : end] = k, v
        keys, values = cache[:, :, :end].transpose(2, 3)
        if self.attention == "recipe":
            out = attend_to_cache(q.transpose(1, 2), keys, values, attention.spec)
        else:
            mask = None if T == 1 else visible(T, end, device=x.device)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
            )
        return attention.wo(out.transpose(1, 2).reshape(B, T, -1))


def rotate_llama(
    q: Tensor, k: Tensor, freqs_cis: Tensor, position_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate as ``LowprecLlama`` does."""
    rotation = rotation_of(freqs_cis, position_BT, tokens=q.shape[1])
    return rotate(q, rotation), rotate(k, rotation)


def check_cacheable(spec: AttentionSpec) -> None:
    """Refuse attention with codes: a token's may change with the tokens that come after it."""
    if spec.quantised:
        raise ValueError(
            f"CachedTarget: attention.recipe must be bf16 or fp32 for decoding, got "
            f"{spec.recipe!r}; decode with --attention.recipe=bf16"
        )


def visible(queries: int, keys: int, *, device: torch.device) -> Tensor:
    """Which keys each of the last queries sees: those up to itself."""
    position = torch.arange(keys, device=device)
    return position[None] <= position[keys - queries :, None]


def attend_to_cache(
    q_BHTD: Float[Tensor, "B H T D"],
    k_BJSD: Float[Tensor, "B J S D"],
    v_BJSD: Float[Tensor, "B J S D"],
    spec: AttentionSpec,
) -> Float[Tensor, "B H T D"]:
    """Attend from the last T of S tokens, with the roundings of our attention op.

    Numerics:
        A weight is rounded relative to the row's maximum so far, tile by tile of keys, as in the
        op's online softmax; products of rounded operands are exact in fp32.
    """
    (B, H, T, D), (J, S) = q_BHTD.shape, k_BJSD.shape[1:3]
    operand, tiles = operand_dtype(spec), -(-S // spec.tile_k)
    q, k, v = (x.to(operand).float() for x in (q_BHTD, k_BJSD, v_BJSD))
    k, v = (F.pad(x, (0, 0, 0, tiles * spec.tile_k - S)) for x in (k, v))
    score = q.reshape(B, J, -1, D) @ k.transpose(-1, -2) * score_factor(D)
    mask = F.pad(visible(T, S, device=q.device), (0, tiles * spec.tile_k - S))
    score = score.unflatten(2, (-1, T)).masked_fill(~mask, -torch.inf)
    score = score.unflatten(-1, (tiles, -1))
    top = score.amax(-1).cummax(-1).values
    unit = torch.exp2(top - top[..., -1:])
    weight = torch.exp2(score - top[..., None])
    rounded = round_plain(weight, spec)
    total = ((rounded if spec.row_sum == "rounded" else weight).sum(-1) * unit).sum(-1)
    part = torch.einsum("bjrtns,bjnsd->bjrtnd", rounded, v.unflatten(2, (tiles, -1)))
    out = (part * unit[..., None]).sum(-2) / total[..., None]
    return out.reshape(B, H, T, D).to(q_BHTD.dtype)
