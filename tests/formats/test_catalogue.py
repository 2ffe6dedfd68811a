"""The catalogue's numbers against the libraries that define the same formats."""

import dataclasses

import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from titan_lowprec.formats.catalogue import (
    BLOCK_FORMATS,
    E2M1FN,
    E4M3FN,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_MAX,
    UE8M0,
    ElementFormat,
    exponent_of,
)

CASES = [
    pytest.param(E4M3FN, ml_dtypes.float8_e4m3fn, gfloat.formats.format_info_ocp_e4m3, id="e4m3fn"),
    pytest.param(E2M1FN, ml_dtypes.float4_e2m1fn, gfloat.formats.format_info_ocp_e2m1, id="e2m1fn"),
]


@pytest.mark.parametrize(("element", "numpy_type", "info"), CASES)
def test_element_formats_equal_ml_dtypes_and_gfloat(
    element: ElementFormat, numpy_type: type, info: gfloat.FormatInfo
) -> None:
    limits = ml_dtypes.finfo(numpy_type)
    assert element.name in np.dtype(numpy_type).name
    assert element.bits == limits.bits == info.k
    assert element.mantissa_bits == limits.nmant == info.precision - 1
    assert element.exponent_bits == limits.nexp == info.expBits
    assert element.bias == info.bias
    assert element.max_value == float(limits.max) == info.max
    assert element.min_normal == float(limits.smallest_normal) == info.smallest_normal
    assert element.min_subnormal == float(limits.smallest_subnormal) == info.smallest_subnormal
    assert element.max_exponent == info.emax
    assert 2.0**element.min_exponent == element.min_normal


def test_e4m3fn_limits_equal_torch() -> None:
    limits = torch.finfo(torch.float8_e4m3fn)
    assert (E4M3FN.max_value, E4M3FN.min_normal) == (limits.max, limits.smallest_normal)


def test_ue8m0_equals_gfloat() -> None:
    info = gfloat.formats.format_info_ocp_e8m0
    assert (UE8M0.bits, UE8M0.bias) == (info.k, info.bias)
    assert gfloat.decode_float(info, UE8M0.max_code).fval == info.max == 2.0**127
    assert np.isnan(gfloat.decode_float(info, UE8M0.nan_code).fval)


def test_block_formats_are_the_published_ones() -> None:
    assert [(b.name, b.element.name, b.scale.name, b.group) for b in BLOCK_FORMATS] == [
        ("mxfp8", "e4m3fn", "ue8m0", 32),
        ("mxfp4", "e2m1fn", "ue8m0", 32),
        ("nvfp4", "e2m1fn", "e4m3fn", 16),
    ]
    assert gfloat.formats.format_info_mxfp8_e4m3.k == MXFP8.group
    assert gfloat.formats.format_info_mxfp4_e2m1.k == MXFP4.group
    assert NVFP4_MAX == NVFP4.element.max_value * E4M3FN.max_value == 2688.0


def test_exponent_of_holds_on_both_sides_of_a_power_of_two() -> None:
    values = [0.75, 1.0, 1.5, 2.0 - 2.0**-52, 2.0, 448.0, 2688.0, 2.0**-149]
    assert [exponent_of(v) for v in values] == [-1, 0, 0, 0, 1, 8, 11, -149]


def test_formats_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3FN.bias = 8  # type: ignore[misc]
