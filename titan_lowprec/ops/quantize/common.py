"""Quantised tensors: codes and the scales that multiply them back to values."""

from dataclasses import dataclass
from typing import Literal

from titan_lowprec.shapes import Float8e4m3fn, Int64, Tensor, UInt8

BlockScales = Literal["token_block", "token"]
OuterScale = Literal["none", "token"]


@dataclass(frozen=True, slots=True)
class Mxfp8:
    """MXFP8 tensor: ``value = 2.0 ** (scale_MG - 127) * codes_MK``, one scale per group."""

    codes_MK: Float8e4m3fn[Tensor, "*M K"]
    scale_MG: UInt8[Tensor, "*M G"]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 tensor: ``value = 2.0 ** (scale_MG - 127) * e2m1fn(codes_MK)``, one code a byte."""

    codes_MK: UInt8[Tensor, "*M K"]
    scale_MG: UInt8[Tensor, "*M G"]


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """NVFP4 tensor: ``value = 2.0 ** (outer_M - 127) * scale_MG * e2m1fn(codes_MK)``."""

    codes_MK: UInt8[Tensor, "*M K"]
    scale_MG: Float8e4m3fn[Tensor, "*M G"]
    outer_M: UInt8[Tensor, "*M"]
    """Power of two of each row, biased by 127; all 127 where no outer scale was asked for."""
    saturated: Int64[Tensor, ""]
    """Finite values beyond the largest code times the largest scale, 2688: now 2688."""


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """Packed tokens in e4m3fn: ``value = 2.0 ** (scale_NH - 127) * codes_NHD``.

    Scale bytes are stored per token and head; the tokens of a block carry equal bytes, so a
    kernel needs no table.
    """

    codes_NHD: Float8e4m3fn[Tensor, "N H D"]
    scale_NH: UInt8[Tensor, "N H"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Square tiles in e4m3fn, one ue8m0 scale a tile."""

    codes_TS: Float8e4m3fn[Tensor, "*B T S"]
    scale_GG: UInt8[Tensor, "*B T_tiles S_tiles"]
