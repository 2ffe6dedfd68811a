"""Triton kernels of token-block quantisation, and the work lists of packed documents."""

from titan_lowprec.ops.quantize.kernel.columns import SUM_EXPONENT, scale_columns
from titan_lowprec.ops.quantize.kernel.encode import (
    permute_token_pairs,
    rceil_exponent,
    scale_exponent,
    scale_factor,
)
from titan_lowprec.ops.quantize.kernel.nvfp4 import Nvfp4Codes, widen_nvfp4
from titan_lowprec.ops.quantize.kernel.quantize import (
    MixedOperand,
    Operand,
    interpreted,
    quantize_gradient,
    quantize_mixed_operand,
    quantize_operand,
    transpose_codes,
)
from titan_lowprec.ops.quantize.kernel.work_items import TILE_BLOCKS, work_lists

__all__ = [
    "SUM_EXPONENT",
    "TILE_BLOCKS",
    "MixedOperand",
    "Nvfp4Codes",
    "Operand",
    "interpreted",
    "permute_token_pairs",
    "quantize_gradient",
    "quantize_mixed_operand",
    "quantize_operand",
    "rceil_exponent",
    "scale_columns",
    "scale_exponent",
    "scale_factor",
    "transpose_codes",
    "widen_nvfp4",
    "work_lists",
]
