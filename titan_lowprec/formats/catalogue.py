"""Number formats as data: every width, bias and maximum of the project is written here."""

import math
from dataclasses import dataclass


def exponent_of(value: float) -> int:
    """Give the exponent ``k`` of ``value = m * 2**k`` with ``1 <= m < 2``.

    Args:
        value: Positive and finite.

    Numerics:
        Exact.

    Source:
        C ``ilogb``.
    """
    return math.frexp(value)[1] - 1


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A small floating-point format without infinities, for stored elements.

    Numerics:
        Values are ``+-m * 2**e`` with ``1 <= m < 2``, ``min_exponent <= e <= max_exponent`` and
        ``mantissa_bits`` bits after the point, up to ``max_value``; below ``min_normal`` they
        are multiples of ``min_subnormal``.

    Source:
        OCP 8-bit Floating Point v1.0 (e4m3fn); OCP Microscaling v1.0, section 5.3 (e2m1fn).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    min_normal: float
    min_subnormal: float

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: 8 for e4m3fn, 2 for e2m1fn."""
        return exponent_of(self.max_value)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias


@dataclass(frozen=True, slots=True)
class ExponentFormat:
    """An unsigned power-of-two format: byte ``b`` stands for ``2.0 ** (b - bias)``.

    Numerics:
        No zero: byte 0 is ``2**-bias``. ``nan_code`` is the only byte that is not a power of two.

    Source:
        OCP Microscaling v1.0, section 5.4 (E8M0).
    """

    name: str
    bits: int
    bias: int
    max_code: int
    nan_code: int


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Elements that share one scale per group of neighbours.

    Numerics:
        ``value = scale * element``; the scale multiplies codes back to values.

    Source:
        OCP Microscaling v1.0, section 5.2 (MXFP8, MXFP4); NVFP4 as in cuBLAS and Transformer
        Engine.
    """

    name: str
    element: ElementFormat
    scale: ElementFormat | ExponentFormat
    group: int


E4M3FN = ElementFormat(
    name="e4m3fn",
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max_value=448.0,
    min_normal=2.0**-6,
    min_subnormal=2.0**-9,
)
E2M1FN = ElementFormat(
    name="e2m1fn",
    bits=4,
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    max_value=6.0,
    min_normal=1.0,
    min_subnormal=0.5,
)
UE8M0 = ExponentFormat(name="ue8m0", bits=8, bias=127, max_code=254, nan_code=255)

MXFP8 = BlockFormat(name="mxfp8", element=E4M3FN, scale=UE8M0, group=32)
MXFP4 = BlockFormat(name="mxfp4", element=E2M1FN, scale=UE8M0, group=32)
NVFP4 = BlockFormat(name="nvfp4", element=E2M1FN, scale=E4M3FN, group=16)

ELEMENT_FORMATS = (E4M3FN, E2M1FN)
NVFP4_MAX = E2M1FN.max_value * E4M3FN.max_value
"""Largest NVFP4 value without an outer scale, 2688."""
BLOCK_FORMATS = (MXFP8, MXFP4, NVFP4)
