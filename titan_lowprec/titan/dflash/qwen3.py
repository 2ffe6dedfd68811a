"""Qwen3 as a frozen target: TorchTitan's model with attention over packed documents."""

from typing import Any, cast

from torchtitan.models.qwen3.model.model import (
    Attention,
    Qwen3Model,
    TransformerBlock,
    apply_rotary_emb,
)

from titan_lowprec.ops.attention.api import Impl, attention_packed
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float, Int, Int32, Tensor
from titan_lowprec.titan.specs import AttentionPlan


class PackedQwen3Attention(Attention):
    """Qwen3's attention by our op; takes ``cu_seqlens`` in the place of a mask."""

    def __init__(self, layer_id: int, model_args: Any, plan: AttentionPlan) -> None:
        super().__init__(model_args)
        self.spec = AttentionSpec.decode(plan.layer_spec(layer_id))
        self.impl: Impl = plan.impl

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        rope_cache: Tensor,
        attention_masks: Int32[Tensor, "B M"],
        positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        B, T, _ = x.shape
        q, k, v = (w(x).view(B, T, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_emb(q, k, rope_cache, positions)
        out = attention_packed(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            attention_masks,
            spec=self.spec,
            impl=self.impl,
        )
        return self.wo(out.out_NHD.reshape(B, T, -1))


class PackedQwen3(Qwen3Model):
    """TorchTitan's Qwen3 whose layers attend to packed documents."""

    def __init__(self, model_args: Any, plan: AttentionPlan) -> None:
        super().__init__(model_args)
        for layer_id in range(model_args.n_layers):
            block = cast(TransformerBlock, self.layers[str(layer_id)])
            block.attention = PackedQwen3Attention(layer_id, model_args, plan)
