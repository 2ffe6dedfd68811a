"""Scale bytes over every exponent and mantissa edge against exact arithmetic."""

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from titan_lowprec.formats.catalogue import E2M1FN, E4M3FN, NVFP4_MAX, ElementFormat
from titan_lowprec.formats.scales import (
    ScaleMode,
    inverse_scale,
    multiply_exp2,
    ue8m0_round_up,
    ue8m0_scale,
)

ELEMENTS = [pytest.param(E4M3FN, id="e4m3fn"), pytest.param(E2M1FN, id="e2m1fn")]
MODES: list[ScaleMode] = ["floor", "ceil", "even", "rceil"]
MANTISSA_EDGES = sorted(
    {
        (edge + step) % 2**23
        for edge in (0, 0x200000, 0x280000, 0x400000, 0x600000, 0x700000, 0x780000, 0x7FFFFF)
        for step in (-3, -2, -1, 0, 1, 2, 3)
    }
)


def all_exponents_and_edges() -> torch.Tensor:
    """Every finite fp32 exponent, subnormals included, times every mantissa edge."""
    pairs = itertools.product(range(255), MANTISSA_EDGES)
    bits = [(exponent << 23) | mantissa for exponent, mantissa in pairs]
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def floor_log2(x: Fraction) -> int:
    k = x.numerator.bit_length() - x.denominator.bit_length()
    return k if Fraction(2) ** k <= x else k - 1


def exact_exponent(amax: Fraction, element: ElementFormat, mode: ScaleMode) -> int:
    """The definitions of the four rules, in rational numbers."""
    if mode == "rceil":
        k = floor_log2(amax / Fraction(element.max_value))
        return k if Fraction(2) ** k * Fraction(element.max_value) == amax else k + 1
    k = floor_log2(amax)
    if mode == "ceil":
        k += Fraction(2) ** k != amax
    if mode == "even":
        step = Fraction(2) ** (k - element.mantissa_bits)
        k = floor_log2(round(amax / step) * step)
    return k - element.max_exponent


def exact_byte(amax: float, element: ElementFormat, mode: ScaleMode) -> int:
    if amax == 0:
        return 0
    return min(max(exact_exponent(Fraction(amax), element, mode), -127), 127) + 127


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_scale_bytes_equal_exact_arithmetic_over_all_exponents(
    element: ElementFormat, mode: ScaleMode, device: torch.device
) -> None:
    amax = all_exponents_and_edges()
    expected = [exact_byte(a, element, mode) for a in amax.tolist()]
    assert ue8m0_scale(amax.to(device), element=element, mode=mode).tolist() == expected
    assert max(expected) <= 253


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mantissa_of_a_binade_has_the_exact_scale_byte(
    element: ElementFormat, mode: ScaleMode, device: torch.device
) -> None:
    mantissa = torch.arange(2**23, dtype=torch.int32)
    amax = (mantissa + (127 << 23)).view(torch.float32)
    scale = ue8m0_scale(amax.to(device), element=element, mode=mode).cpu()
    steps = torch.nonzero(scale.to(torch.int16).diff())
    # One step, where the first value above it needs the next exponent by exact arithmetic.
    assert len(steps) == (0 if mode == "floor" else 1)
    for i in (0, 2**23 - 1, *(int(s) + d for s in steps for d in (-1, 0, 1, 2))):
        if 0 <= i < 2**23:
            assert int(scale[i]) == exact_byte(float(amax[i]), element, mode)


@pytest.mark.parametrize("element", ELEMENTS)
def test_round_up_never_saturates_and_wastes_less_than_a_factor_of_two(
    element: ElementFormat,
) -> None:
    amax = all_exponents_and_edges()
    byte = ue8m0_scale(amax, element=element, mode="rceil")
    scaled = amax.to(torch.float64) * 2.0 ** (127.0 - byte.to(torch.float64))
    assert float(scaled.max()) == element.max_value
    assert float(scaled[byte > 0].min()) > element.max_value / 2


def test_group_max_500_clips_under_floor_and_fits_under_rceil(device: torch.device) -> None:
    amax = torch.tensor([500.0, 448.0, 449.0], device=device)
    assert ue8m0_scale(amax, element=E4M3FN, mode="floor").tolist() == [127, 127, 127]
    assert ue8m0_scale(amax, element=E4M3FN, mode="rceil").tolist() == [128, 127, 128]
    assert ue8m0_scale(amax, element=E4M3FN, mode="even").tolist() == [128, 127, 127]
    assert ue8m0_scale(amax, element=E4M3FN, mode="ceil").tolist() == [128, 128, 128]


@pytest.mark.parametrize("mode", MODES)
def test_zero_nan_and_infinity_have_their_own_bytes(mode: ScaleMode, device: torch.device) -> None:
    amax = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1.0], device=device)
    byte = ue8m0_scale(amax, element=E4M3FN, mode=mode).tolist()
    assert byte[:6] == [0, 0, 255, 255, 255, 0]
    assert byte[6] == ue8m0_scale(-amax[6:], element=E4M3FN, mode=mode).item()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_bf16_maxima_have_the_scale_bytes_of_torchao(
    element: ElementFormat, mode: ScaleMode
) -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    torch_type = torch.float8_e4m3fn if element is E4M3FN else torch.float4_e2m1fn_x2
    groups = torch.zeros(len(amax), 32, dtype=torch.bfloat16)
    groups[:, 5] = -amax
    theirs, _ = mx_tensor.to_mx(
        groups, torch_type, 32, mx_tensor.ScaleCalculationMode[mode.upper()]
    )
    ours = ue8m0_scale(amax.to(torch.float32), element=element, mode=mode)
    assert torch.equal(ours, theirs.view(torch.uint8).flatten())


@pytest.mark.parametrize("element", ELEMENTS)
def test_outer_round_up_rule_is_rceil_for_the_maximum_of_an_element(element: ElementFormat) -> None:
    amax = all_exponents_and_edges()
    assert torch.equal(
        ue8m0_round_up(amax, max_value=element.max_value),
        ue8m0_scale(amax, element=element, mode="rceil"),
    )


def test_outer_round_up_for_2688_equals_exact_arithmetic(device: torch.device) -> None:
    amax = all_exponents_and_edges()
    expected = []
    for a in amax.tolist():
        ratio = Fraction(a) / Fraction(NVFP4_MAX)
        k = floor_log2(ratio) if a else -127
        k += bool(a) and Fraction(2) ** k != ratio
        expected.append(max(k, -127) + 127)
    assert ue8m0_round_up(amax.to(device), max_value=NVFP4_MAX).tolist() == expected


def test_unknown_rules_and_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="amax"):
        ue8m0_scale(torch.ones(1, dtype=torch.bfloat16), element=E4M3FN, mode="floor")
    with pytest.raises(ValueError, match="ue8m0_round_up: max_value must be in"):
        ue8m0_round_up(torch.ones(1), max_value=1.0)


def test_an_unknown_scale_mode_is_refused_by_name() -> None:
    # The shape-checked pass refuses the literal before the function does.
    with pytest.raises((ValueError, TypeError), match="'nearest'"):
        ue8m0_scale(torch.ones(1), element=E4M3FN, mode="nearest")


def test_inverse_scales_are_exact_reciprocals(device: torch.device) -> None:
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    inverse = inverse_scale(byte).cpu().to(torch.float64)
    powers = 2.0 ** (127.0 - torch.arange(255, dtype=torch.float64))
    assert torch.equal(inverse[:255], powers)
    assert inverse[255] == 0


def test_multiply_exp2_rounds_once_for_any_exponent(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 255 << 23, (400, 1), generator=generator, dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), all_exponents_and_edges()[::97, None]])
    x = torch.cat([x, -x])
    exponent = torch.arange(-300, 301, dtype=torch.int32)
    exact = np.ldexp(x.numpy().astype(np.float64), exponent.numpy())
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(exact.astype(np.float32))
    actual = multiply_exp2(x.to(device), exponent.to(device)).cpu()
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def test_row_and_column_exponents_of_254_survive(device: torch.device) -> None:
    x = torch.tensor([2.0**-140, 2.0**100, 1.0], device=device)
    exponent = torch.tensor([254, -240, -149], dtype=torch.int32, device=device)
    assert multiply_exp2(x, exponent).tolist() == [2.0**114, 2.0**-140, 2.0**-149]
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], device=device)
    product = multiply_exp2(special, torch.full((4,), -300, dtype=torch.int32, device=device))
    assert product[:2].tolist() == [torch.inf, -torch.inf]
    assert bool(product[2].isnan())
    assert bool(torch.signbit(product[3]))


def test_multiply_exp2_wants_int32() -> None:
    with pytest.raises(TypeError, match="exponent"):
        multiply_exp2(torch.ones(1), torch.ones(1, dtype=torch.int64))


def test_ue8m0_bytes_of_powers_of_two_equal_ml_dtypes() -> None:
    powers = 2.0 ** np.arange(-118, 128, dtype=np.float64)
    theirs = powers.astype(np.float32).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    ours = ue8m0_scale(torch.from_numpy(powers.astype(np.float32)), element=E4M3FN, mode="floor")
    np.testing.assert_array_equal(ours.numpy(), theirs - E4M3FN.max_exponent)
