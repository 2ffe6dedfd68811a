"""Number formats as data: every width, bias and maximum of the project is written here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A small floating-point format without infinities, for stored elements.

    Numerics:
        The largest finite value is ``max_mantissa * 2**max_exponent`` with
        ``1 <= max_mantissa < 2``. Subnormals are part of the format.

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
        return int(self.max_value).bit_length() - 1

    @property
    def max_mantissa(self) -> float:
        """Mantissa in ``[1, 2)`` of the largest finite value: 1.75 for e4m3fn, 1.5 for e2m1fn."""
        return self.max_value / 2.0**self.max_exponent

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
BLOCK_FORMATS = (MXFP8, MXFP4, NVFP4)
