"""Rounding onto the grid of an element format, in float64."""

import torch

from titan_lowprec.formats.catalogue import ElementFormat
from titan_lowprec.shapes import Float64, Tensor

_F64_MANTISSA_BITS = 52
_F64_EXPONENT_MASK = 0x7FF
_F64_BIAS = 1023


def round_to_grid(x: Float64[Tensor, "*N"], *, element: ElementFormat) -> Float64[Tensor, "*N"]:
    """Round float64 values to the nearest value of an element format, ties to even.

    Args:
        x: Finite values, at most ``element.max_value`` in magnitude.
        element: The format to round to.

    Returns:
        Values that the format holds exactly, still float64, signed zeros kept.

    Numerics:
        Exact. The spacing ``2**(e - mantissa_bits)`` comes from the exponent bits; dividing and
        multiplying by a power of two loses nothing in this range, and ``torch.round`` is ties to
        even. A cast through fp32 would round twice.

    Source:
        IEEE 754-2019, section 4.3.1 (roundTiesToEven).
    """
    exponent = ((x.view(torch.int64) >> _F64_MANTISSA_BITS) & _F64_EXPONENT_MASK) - _F64_BIAS
    quantum_exponent = exponent.clamp(min=element.min_exponent) - element.mantissa_bits
    quantum = ((quantum_exponent + _F64_BIAS) << _F64_MANTISSA_BITS).view(torch.float64)
    return torch.round(x / quantum) * quantum
