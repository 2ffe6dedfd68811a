"""Right operands of the products over tokens: V, G, Q and K, with what is folded away from them."""

from dataclasses import dataclass

import torch

from titan_lowprec.formats.catalogue import E2M1FN
from titan_lowprec.formats.codec import decode_e2m1fn, decode_ue8m0, encode_e2m1fn
from titan_lowprec.formats.scales import inverse_scale, ue8m0_scale
from titan_lowprec.ops.attention.reference.casts import round_nvfp4
from titan_lowprec.ops.attention.reference.operands import Operand, ue8m0_exponent
from titan_lowprec.ops.attention.reference.tiles import PairStep, TilePlan, gather_tiles
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float32, Int, Tensor


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """Vectors of tokens in tiles, as the right operand of a product that sums over the tokens.

    ``folded`` tiles are codes whose token exponents the left operand takes before its cast; the
    other tiles carry their scales themselves.
    """

    scaled: Float32[Tensor, "K J S D"] | None
    folded: Float32[Tensor, "K J S D"] | None
    exponent: Float32[Tensor, "K J S"] | None
    """log2 of the folded factor; NaN where the factor is."""
    factor: Float32[Tensor, "K J S"] | None

    def right_operand(self, plan: TilePlan, step: PairStep) -> "RightOperand":
        """Give key-side vectors of a step's pairs.

        With both forms at hand (4 bits) the pairs that the causal diagonal crosses take the
        folded one: a scale group along keys would straddle the mask there.
        """
        index = step.k_tile_P
        if self.scaled is None or self.folded is None:
            return self.rows(index)
        assert self.exponent is not None and self.factor is not None
        last_key_P = plan.k_position_KS[index, -1]
        crossed_P11 = (last_key_P > plan.q_position_QT[step.q_tile_P, 0])[:, None, None]
        return RightOperand(
            torch.where(crossed_P11[..., None], self.folded[index], self.scaled[index]),
            torch.where(crossed_P11, self.exponent[index], 0.0),
            torch.where(crossed_P11, self.factor[index], 1.0),
        )

    def rows(self, index: Int[Tensor, " P"]) -> "RightOperand":
        """Give some tiles in the only form at hand."""
        if self.scaled is not None:
            return RightOperand(self.scaled[index], None, None)
        assert self.folded is not None and self.exponent is not None and self.factor is not None
        return RightOperand(self.folded[index], self.exponent[index], self.factor[index])


@dataclass(frozen=True, slots=True)
class RightOperand:
    """Vectors of some tiles and what the left operand must fold in before its cast, if anything."""

    values_PJSD: Float32[Tensor, "P J S D"]
    exponent_PJS: Float32[Tensor, "P J S"] | None
    factor_PJS: Float32[Tensor, "P J S"] | None


def token_tiles(
    operand: Operand, token_KS: Int[Tensor, "K S"], spec: AttentionSpec, *, causal_groups: bool
) -> TokenTiles:
    """Gather vectors into tiles as the right operand of a product over their tokens.

    Args:
        operand: The vectors.
        token_KS: Tokens of the tiles.
        spec: Says whether exponents are folded.
        causal_groups: Under ``nvfp4_full``, whether a query must not see its group's later
            tokens (V in the forward, K in dQ).
    """
    if spec.recipe == "nvfp4_full":
        tiles = gather_tiles(operand.values_NHD, token_KS, padding=0.0)
        along_tokens = round_nvfp4(tiles.transpose(-1, -2).contiguous()).transpose(-1, -2)
        if not causal_groups or spec.mask == "full":
            return TokenTiles(along_tokens.contiguous(), None, None, None)
        return TokenTiles(along_tokens.contiguous(), *_per_token_e2m1(tiles))
    if spec.fold == "hopper":
        return TokenTiles(
            scaled=None,
            folded=gather_tiles(operand.values_NHD, token_KS, padding=0.0),
            exponent=gather_tiles(operand.exponent_NH, token_KS, padding=0.0),
            factor=gather_tiles(operand.factor_NH, token_KS, padding=1.0),
        )
    return TokenTiles(gather_tiles(operand.decoded(), token_KS, padding=0.0), None, None, None)


def _per_token_e2m1(tiles: Float32[Tensor, "K J S D"]) -> tuple[Tensor, Tensor, Tensor]:
    """Cast each token's vector to e2m1fn with one round-up power of two."""
    scale = ue8m0_scale(tiles.abs().amax(-1), element=E2M1FN, mode="rceil")
    codes = decode_e2m1fn(encode_e2m1fn(tiles * inverse_scale(scale)[..., None]))
    return codes, ue8m0_exponent(scale), decode_ue8m0(scale)
