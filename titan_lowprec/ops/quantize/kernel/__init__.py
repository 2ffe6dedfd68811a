"""Triton kernels of token-block quantisation, and the work lists of packed documents."""

from titan_lowprec.ops.quantize.kernel.encode import (
    permute_token_pairs,
    scale_byte,
    scale_exponent,
    scale_factor,
)
from titan_lowprec.ops.quantize.kernel.quantize import (
    Operand,
    interpreted,
    quantize_gradient,
    quantize_operand,
    transpose_codes,
)
from titan_lowprec.ops.quantize.kernel.work_items import TILE_BLOCKS, work_items

__all__ = [
    "TILE_BLOCKS",
    "Operand",
    "interpreted",
    "permute_token_pairs",
    "quantize_gradient",
    "quantize_operand",
    "scale_byte",
    "scale_exponent",
    "scale_factor",
    "transpose_codes",
    "work_items",
]
