"""The draft model; attribute names are the tensor names of published DFlash checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from titan_lowprec.models.dflash.args import DFlashArgs
from titan_lowprec.models.dflash.attention import Impl, draft_attention
from titan_lowprec.shapes import Bool, Float, Int64, Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm whose variance is fp32 (fp64 for fp64)."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        high = x if x.dtype == torch.float64 else x.float()
        high = high * torch.rsqrt(high.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * high.to(x.dtype)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of every position, both halves of a head alike."""

    cos_BTD: Float[Tensor, "B T D"]
    sin_BTD: Float[Tensor, "B T D"]

    def rotate(self, x_BHTD: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
        """Rotate the two halves of every head against each other; one rounding, at the end."""
        high = x_BHTD if x_BHTD.dtype == torch.float64 else x_BHTD.float()
        first, second = high.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        out = high * self.cos_BTD[:, None] + turned * self.sin_BTD[:, None]
        return out.to(x_BHTD.dtype)


def inverse_frequency(*, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return fp32 rotary frequencies, bit for bit Hugging Face's.

    They are computed where they are used and are no buffer, so that no cast of the model and no
    sharding reaches them: rounded to bf16, the angle at position 4000 is off by up to 8 radians.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return 1.0 / (theta**exponent)


def rotary_table(position_BT: Int64[Tensor, "B T"], *, head_dim: int, theta: float) -> RotaryTable:
    """Compute cosines and sines of positions in fp32."""
    inv_freq = inverse_frequency(head_dim=head_dim, theta=theta, device=position_BT.device)
    angle = position_BT.float()[..., None] * inv_freq
    angle = torch.cat((angle, angle), dim=-1)
    return RotaryTable(angle.cos(), angle.sin())


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from context and block by the same weights."""

    def __init__(self, args: DFlashArgs) -> None:
        super().__init__()
        E, D = args.model_dim, args.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(E, args.heads * D, bias=False)
        self.k_proj = nn.Linear(E, args.kv_heads * D, bias=False)
        self.v_proj = nn.Linear(E, args.kv_heads * D, bias=False)
        self.o_proj = nn.Linear(args.heads * D, E, bias=False)
        self.q_norm = RMSNorm(D, eps=args.norm_eps)
        self.k_norm = RMSNorm(D, eps=args.norm_eps)

    def forward(
        self,
        x_BTE: Float[Tensor, "B T E"],
        context_BSE: Float[Tensor, "B S E"],
        query_rotary: RotaryTable,
        key_rotary: RotaryTable,
        mask: Bool[Tensor, "B T K"] | BlockMask,
        impl: Impl,
    ) -> Float[Tensor, "B T E"]:
        source_BKE = torch.cat((context_BSE, x_BTE), dim=1)
        k_BJKD, v_BJKD = self.keys_values(source_BKE, key_rotary)
        return self.attend(x_BTE, query_rotary, k_BJKD, v_BJKD, mask, impl)

    def keys_values(
        self, source_BKE: Float[Tensor, "B K E"], rotary: RotaryTable
    ) -> tuple[Float[Tensor, "B J K D"], Float[Tensor, "B J K D"]]:
        """Rotated keys, and values, of context or block."""
        k_BJKD = rotary.rotate(self.k_norm(self._heads(self.k_proj(source_BKE))))
        return k_BJKD, self._heads(self.v_proj(source_BKE))

    def attend(
        self,
        x_BTE: Float[Tensor, "B T E"],
        rotary: RotaryTable,
        k_BJKD: Float[Tensor, "B J K D"],
        v_BJKD: Float[Tensor, "B J K D"],
        mask: Bool[Tensor, "B T K"] | BlockMask,
        impl: Impl,
    ) -> Float[Tensor, "B T E"]:
        """Attend from the block to keys and values that are given."""
        q_BHTD = rotary.rotate(self.q_norm(self._heads(self.q_proj(x_BTE))))
        out_BHTD = draft_attention(q_BHTD, k_BJKD, v_BJKD, mask=mask, impl=impl)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))

    def _heads(self, x: Float[Tensor, "B T O"]) -> Float[Tensor, "B H T D"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, args: DFlashArgs) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(args.model_dim, args.hidden_dim, bias=False)
        self.up_proj = nn.Linear(args.model_dim, args.hidden_dim, bias=False)
        self.down_proj = nn.Linear(args.hidden_dim, args.model_dim, bias=False)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU; the context enters attention as it is."""

    def __init__(self, args: DFlashArgs) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(args.model_dim, eps=args.norm_eps)
        self.self_attn = DraftAttention(args)
        self.post_attention_layernorm = RMSNorm(args.model_dim, eps=args.norm_eps)
        self.mlp = SwiGLU(args)

    def forward(
        self,
        x_BTE: Float[Tensor, "B T E"],
        context_BSE: Float[Tensor, "B S E"],
        query_rotary: RotaryTable,
        key_rotary: RotaryTable,
        mask: Bool[Tensor, "B T K"] | BlockMask,
        impl: Impl,
    ) -> Float[Tensor, "B T E"]:
        normed = self.input_layernorm(x_BTE)
        out_BTE = self.self_attn(normed, context_BSE, query_rotary, key_rotary, mask, impl)
        return self.feed_forward(x_BTE + out_BTE)

    def feed_forward(self, x_BTE: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """The second half of the layer, with its residual."""
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class DraftModel(nn.Module):
    """Fuses the target's features once and passes blocks through the draft layers.

    Embedding and head are the target's and come from outside (`FrozenTables`): the state dict
    holds the draft alone.
    """

    def __init__(self, args: DFlashArgs) -> None:
        super().__init__()
        self.args = args
        self.fc = nn.Linear(args.feature_dim, args.model_dim, bias=False)
        self.hidden_norm = RMSNorm(args.model_dim, eps=args.norm_eps)
        self.layers = nn.ModuleList(DraftLayer(args) for _ in range(args.layers))
        self.norm = RMSNorm(args.model_dim, eps=args.norm_eps)

    def init_weights(self, *, std: float = 0.02) -> None:
        """Draw matrices from N(0, std**2) and set the norms' weights to 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)

    def context(self, features_BSO: Float[Tensor, "B S O"]) -> Float[Tensor, "B S E"]:
        """Fuse the target's features, once for all layers."""
        return self.hidden_norm(self.fc(features_BSO))

    def forward(
        self,
        features_BSO: Float[Tensor, "B S O"],
        embedded_BTE: Float[Tensor, "B T E"],
        *,
        context_position_BS: Int64[Tensor, "B S"],
        block_position_BT: Int64[Tensor, "B T"],
        mask: Bool[Tensor, "B T K"] | BlockMask,
        impl: Impl,
    ) -> Float[Tensor, "B T E"]:
        """Return the normed hidden state of every drafted token.

        Args:
            features_BSO: Taps side by side, of the tokens at the same indices; see `select_taps`.
            embedded_BTE: Embeddings of the blocks' input tokens.
            context_position_BS: Position of each context token in its document.
            block_position_BT: Position of each drafted token in its document.
            mask: From `build_mask`, with the same ``impl``.
            impl: Implementation of attention.
        """
        rotary = {"head_dim": self.args.head_dim, "theta": self.args.rope_theta}
        query_rotary = rotary_table(block_position_BT, **rotary)
        key_position = torch.cat((context_position_BS, block_position_BT), dim=1)
        key_rotary = rotary_table(key_position, **rotary)
        context_BSE = self.context(features_BSO)
        x_BTE = embedded_BTE
        for layer in self.layers:
            x_BTE = layer(x_BTE, context_BSE, query_rotary, key_rotary, mask, impl)
        return self.norm(x_BTE)


def select_taps(
    hidden_states: Sequence[Float[Tensor, "B S E"]], taps: Sequence[int]
) -> Float[Tensor, "B S O"]:
    """Put tapped layers side by side; entry 0 is the embedding, so layer ``i`` is entry ``i + 1``.

    Raises:
        ValueError: A tap is outside the target, or is the last entry, which is after the norm.
    """
    for layer in taps:
        if not 0 <= layer < len(hidden_states) - 2:
            raise ValueError(
                f"select_taps: taps must be in [0, {len(hidden_states) - 2}) for "
                f"{len(hidden_states)} hidden states (the embedding's first, the final norm's "
                f"last), got {layer}"
            )
    return torch.cat([hidden_states[layer + 1] for layer in taps], dim=-1)
