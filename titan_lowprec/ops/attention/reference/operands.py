"""Operands of the products over features: codes of Q, K, V and G with their token exponents."""

from dataclasses import dataclass

import torch

from titan_lowprec.formats.catalogue import NVFP4, UE8M0
from titan_lowprec.formats.codec import decode_e4m3fn, decode_ue8m0, pack_e2m1fn, unpack_e2m1fn
from titan_lowprec.formats.token_blocks import row_metadata
from titan_lowprec.ops.attention.common import Saved, empty_slot, operand_dtype
from titan_lowprec.ops.attention.reference.casts import round_nvfp4, round_plain
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.hadamard.api import hadamard
from titan_lowprec.ops.quantize.api import (
    Nvfp4,
    dequantize_nvfp4,
    quantize_nvfp4,
    quantize_token_blocks,
)
from titan_lowprec.shapes import Float, Float32, Int32, Tensor, UInt8


@dataclass(frozen=True, slots=True)
class Operand:
    """Vectors of tokens as ``values * factor``, with ``factor`` a power of two a token and head."""

    values_NHD: Float32[Tensor, "N H D"]
    factor_NH: Float32[Tensor, "N H"]
    exponent_NH: Float32[Tensor, "N H"]
    """log2 of the factor; NaN where the factor is."""

    def decoded(self) -> Float32[Tensor, "N H D"]:
        """The vectors themselves."""
        return self.values_NHD * self.factor_NH[..., None]


def plain_operand(values_NHD: Float[Tensor, "N H D"]) -> Operand:
    """Vectors without a scale."""
    values_NHD = values_NHD.to(torch.float32)
    ones_NH = torch.ones_like(values_NHD[..., 0])
    return Operand(values_NHD, ones_NH, torch.zeros_like(ones_NH))


def coded_operand(codes_NHD: Tensor, scale_NH: UInt8[Tensor, "N H"]) -> Operand:
    """Vectors from e4m3fn codes and biased exponents."""
    return Operand(decode_e4m3fn(codes_NHD), decode_ue8m0(scale_NH), ue8m0_exponent(scale_NH))


def ue8m0_exponent(scale: UInt8[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Give log2 of ue8m0 scales; NaN for the NaN byte."""
    exponent = scale.to(torch.float32) - UE8M0.bias
    return torch.where(scale == UE8M0.nan_code, torch.nan, exponent)


def encode_operands(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    spec: AttentionSpec,
) -> dict[str, Tensor]:
    """Produce every slot of ``Saved`` that depends on the inputs alone."""
    unused = ("q_scale", "k_scale", "v_scale", "q4_codes", "q4_scale", "k4_codes", "k4_scale")
    slots = {name: empty_slot(torch.uint8, q_NHD.device) for name in unused}
    if not spec.quantised:
        values = zip("qkv", (q_NHD, k_NJD, v_NJD), strict=True)
        return slots | {f"{name}_codes": x.to(operand_dtype(spec)) for name, x in values}
    if spec.rotate:
        q_NHD, k_NJD = hadamard(q_NHD), hadamard(k_NJD)
    if spec.recipe == "nvfp4_full":
        values = zip("qkv", (q_NHD, k_NJD, v_NJD), strict=True)
        return slots | {f"{name}_codes": x.to(torch.float32, copy=True) for name, x in values}
    block_N = _block_of_token(cu_seqlens_RM, q_NHD.shape[0])
    for name, x in zip("qkv", (q_NHD, k_NJD, v_NJD), strict=True):
        blocks = quantize_token_blocks(x, block_N, scales=spec.scales)
        slots |= {f"{name}_codes": blocks.codes_NHD, f"{name}_scale": blocks.scale_NH}
    if spec.recipe == "nvfp4_mixed":
        for name, x in zip("qk", (q_NHD, k_NJD), strict=True):
            four = quantize_nvfp4(x, group=NVFP4.group, outer="none")
            slots[f"{name}4_codes"] = pack_e2m1fn(four.codes_MK)
            slots[f"{name}4_scale"] = four.scale_MG.view(torch.uint8)
    return slots


def _block_of_token(cu_seqlens_RM: Int32[Tensor, "R M1"], total_tokens: int) -> Int32[Tensor, " N"]:
    rows = max(cu_seqlens_RM.shape[0], 1)
    return row_metadata(cu_seqlens_RM, row_tokens=total_tokens // rows).block_index_N


def product_operands(saved: Saved, spec: AttentionSpec) -> tuple[Operand, Operand, Operand]:
    """Q, K and V as the products over tokens and the product with V use them."""
    slots = (
        (saved.q_codes, saved.q_scale),
        (saved.k_codes, saved.k_scale),
        (saved.v_codes, saved.v_scale),
    )
    if not spec.quantised or spec.recipe == "nvfp4_full":
        q, k, v = (plain_operand(values) for values, _ in slots)
    else:
        q, k, v = (coded_operand(codes, scale) for codes, scale in slots)
    return q, k, v


def score_operands(
    saved: Saved, q: Operand, k: Operand, spec: AttentionSpec
) -> tuple[Operand, Operand]:
    """Q and K as the scores use them, forward and backward alike, from the product operands."""
    if spec.recipe == "nvfp4_mixed":
        return (
            _nvfp4_operand(saved.q4_codes, saved.q4_scale),
            _nvfp4_operand(saved.k4_codes, saved.k4_scale),
        )
    if spec.recipe == "nvfp4_full":
        return plain_operand(round_nvfp4(q.values_NHD)), plain_operand(round_nvfp4(k.values_NHD))
    return q, k


def _nvfp4_operand(packed: UInt8[Tensor, "N H half"], scale: UInt8[Tensor, "N H G"]) -> Operand:
    outer = torch.full(scale.shape[:-1], UE8M0.bias, dtype=torch.uint8, device=scale.device)
    four = Nvfp4(
        codes_MK=unpack_e2m1fn(packed),
        scale_MG=scale.view(torch.float8_e4m3fn),
        outer_M=outer,
        saturated=torch.zeros((), dtype=torch.int64, device=scale.device),
    )
    return plain_operand(dequantize_nvfp4(four))


def gradient_operand(
    grad_out_NHD: Float[Tensor, "N H D"], cu_seqlens_RM: Int32[Tensor, "R M1"], spec: AttentionSpec
) -> Operand:
    """The incoming gradient, one representation for dP, dV and (but for a named fault) D."""
    if not spec.quantised:
        return plain_operand(round_plain(grad_out_NHD.to(torch.float32), spec))
    if spec.recipe == "nvfp4_full":
        return plain_operand(round_nvfp4(grad_out_NHD.to(torch.float32)))
    block_N = _block_of_token(cu_seqlens_RM, grad_out_NHD.shape[0])
    blocks = quantize_token_blocks(grad_out_NHD, block_N, scales=spec.scales)
    return coded_operand(blocks.codes_NHD, blocks.scale_NH)
