"""Greedy answers of the target in batches, with keys and values kept, for training text."""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.qwen3.model.model import apply_rotary_emb as rotate_qwen3

from titan_lowprec.shapes import Float, Int64, Tensor
from titan_lowprec.titan.dflash.target import FrozenTarget
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.llama3.rotary import rotate, rotation_of


def rotate_llama(
    q: Tensor, k: Tensor, freqs_cis: Tensor, position_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate as ``LowprecLlama`` does."""
    rotation = rotation_of(freqs_cis, position_BT, tokens=q.shape[1])
    return rotate(q, rotation), rotate(k, rotation)


class CachedTarget:
    """A target that extends sequences of equal length, all at once, computing only what is new.

    Attention is PyTorch's own, in the target's type: for text to train on. Tokens that ties in
    rounding decide may differ from those of the target's packed attention.
    """

    def __init__(self, target: FrozenTarget, *, rows: int, capacity: int) -> None:
        if capacity > target.max_positions:
            raise ValueError(
                f"CachedTarget: prompt and answer must have at most {target.max_positions} tokens, "
                f"got {capacity}; shorten them, or raise training.seq_len"
            )
        self.target, self.model = target, target.module.model
        self.length = 0
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

    @torch.no_grad()
    def extend(self, tokens_BT: Int64[Tensor, "B T"]) -> Float[Tensor, "B V"]:
        """Append tokens and return the logits of what follows the last one."""
        T = tokens_BT.shape[1]
        if self.length and T > 1:
            raise ValueError(f"CachedTarget: one token at a time after the prompt, got {T}")
        position = torch.arange(self.length, self.length + T, device=tokens_BT.device)
        position_BT = position.expand(tokens_BT.shape)
        h = self.model.tok_embeddings(tokens_BT)
        for number, layer in enumerate(self.model.layers.values()):
            h = h + self._attend(layer.attention, layer.attention_norm(h), number, position_BT)
            h = h + layer.feed_forward(layer.ffn_norm(h))
        self.length += T
        return self.target.tables.logits(self.model.norm(h[:, -1]))

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
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, is_causal=T > 1, enable_gqa=True
        )
        return attention.wo(out.transpose(1, 2).reshape(B, T, -1))


def greedy_answers(
    target: FrozenTarget,
    prompts_BP: Int64[Tensor, "B P"],
    *,
    answer_tokens: int,
    eos_ids: Collection[int],
) -> Int64[Tensor, "B A"]:
    """The target's likeliest continuation of prompts; after an eos token, eos tokens."""
    B, P = prompts_BP.shape
    cached = CachedTarget(target, rows=B, capacity=P + answer_tokens)
    logits = cached.extend(prompts_BP)
    ends = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=prompts_BP.device)
    done = torch.zeros(B, dtype=torch.bool, device=prompts_BP.device)
    answer: list[Tensor] = []
    for number in range(answer_tokens):
        token = logits.argmax(-1)
        if len(ends):
            token = torch.where(done, ends[0], token)
            done |= torch.isin(token, ends)
        answer.append(token)
        if number + 1 < answer_tokens:
            logits = cached.extend(token[:, None])
    return torch.stack(answer, dim=1)
