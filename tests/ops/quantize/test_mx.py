"""MXFP8 and MXFP4 against float64 arithmetic, ml_dtypes, gfloat and torchao, in bits."""

from collections.abc import Callable

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from titan_lowprec.formats.catalogue import E2M1FN, E4M3FN, ElementFormat
from titan_lowprec.formats.scales import ScaleMode
from titan_lowprec.ops.quantize.api import (
    Mxfp4,
    Mxfp8,
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_mxfp4,
    quantize_mxfp8,
)

MODES: list[ScaleMode] = ["floor", "ceil", "even", "rceil"]
QUANTISERS: dict[str, tuple[Callable[..., Mxfp8 | Mxfp4], Callable[..., torch.Tensor]]] = {
    "e4m3fn": (quantize_mxfp8, dequantize_mxfp8),
    "e2m1fn": (quantize_mxfp4, dequantize_mxfp4),
}
NUMPY_TYPES = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e2m1fn": ml_dtypes.float4_e2m1fn}
ELEMENTS = [pytest.param(E4M3FN, id="mxfp8"), pytest.param(E2M1FN, id="mxfp4")]


def raw_codes(quantized: Mxfp8 | Mxfp4) -> np.ndarray:
    return quantized.codes_MK.view(torch.uint8).cpu().numpy()


def expected_scale(amax: np.ndarray, element: ElementFormat, mode: ScaleMode) -> np.ndarray:
    """The four rules in float64, where fp32 maxima and powers of two are exact."""
    mantissa, exponent = np.frexp(amax.astype(np.float64))
    mantissa, exponent = 2 * mantissa, exponent - 1
    up = {
        "floor": np.zeros(amax.shape, bool),
        "ceil": mantissa > 1,
        "even": mantissa >= 2 - 2.0 ** -(element.mantissa_bits + 1),
        "rceil": mantissa * 2.0**element.max_exponent > element.max_value,
    }[mode]
    byte = np.clip(exponent + up - element.max_exponent, -127, 127) + 127
    return np.where(amax == 0, 0, byte).astype(np.uint8)


def expected(
    x: np.ndarray, element: ElementFormat, mode: ScaleMode, group: int
) -> tuple[np.ndarray, np.ndarray]:
    groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    scale = expected_scale(np.abs(groups).max(-1), element, mode)
    scaled = np.ldexp(groups, 127 - scale.astype(np.int64)[..., None])
    clamped = np.clip(scaled, -element.max_value, element.max_value).astype(np.float32)
    codes = clamped.astype(NUMPY_TYPES[element.name]).view(np.uint8)
    return codes.reshape(x.shape), scale


def groups_under_every_bf16_maximum() -> torch.Tensor:
    """One group per positive finite bf16 value, which is its maximum; the rest spans the range."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fractions = torch.rand(len(amax), 31) * torch.exp2(-12 * torch.rand(len(amax), 31))
    signs = torch.randint(0, 2, fractions.shape) * 2 - 1
    rest = (amax.to(torch.float32).unsqueeze(1) * fractions * signs).to(torch.bfloat16)
    return torch.cat([rest[:, :9], amax.unsqueeze(1), rest[:, 9:]], dim=1)


def groups_beside_scale_boundaries() -> torch.Tensor:
    """fp32 groups whose maxima lie within two ulp of every scale boundary of every exponent."""
    edges = [0, 0x400000, 0x600000, 0x780000, 0x700000, 0x7FFFFF]
    mantissa = torch.tensor([(e + d) % 2**23 for e in edges for d in range(-2, 3)])
    bits = (torch.arange(255).unsqueeze(1) << 23) + mantissa
    amax = bits.flatten().to(torch.int32).view(torch.float32)
    return torch.cat([amax.unsqueeze(1), amax.unsqueeze(1) * (torch.rand(len(amax), 31) - 0.5)], 1)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "groups", [groups_under_every_bf16_maximum, groups_beside_scale_boundaries]
)
def test_codes_and_scales_equal_float64_and_ml_dtypes(
    groups: Callable[[], torch.Tensor],
    mode: ScaleMode,
    element: ElementFormat,
    device: torch.device,
) -> None:
    x = groups()
    quantise, dequantise = QUANTISERS[element.name]
    quantized = quantise(x.to(device), group=32, scale_mode=mode)
    codes, scale = expected(x.to(torch.float32).numpy(), element, mode, 32)
    np.testing.assert_array_equal(quantized.scale_MG.cpu().numpy(), scale)
    np.testing.assert_array_equal(raw_codes(quantized), codes)

    values = codes.view(NUMPY_TYPES[element.name]).astype(np.float64)
    exact = np.ldexp(values, scale.astype(np.int64).repeat(32, -1) - 127)
    with np.errstate(over="ignore"):
        exact = exact.astype(np.float32)
    np.testing.assert_array_equal(dequantise(quantized).cpu().numpy(), exact)


@pytest.mark.parametrize("element", ELEMENTS)
def test_floor_rule_equals_gfloat_block_quantisation(element: ElementFormat) -> None:
    info = {
        "e4m3fn": gfloat.formats.format_info_mxfp8_e4m3,
        "e2m1fn": gfloat.formats.format_info_mxfp4_e2m1,
    }[element.name]
    x = torch.randn(60, 32) * torch.exp2(torch.linspace(-100, 100, 60)).unsqueeze(1)
    quantise, dequantise = QUANTISERS[element.name]
    ours = dequantise(quantise(x, group=32, scale_mode="floor")).to(torch.float64).numpy()
    for row, values in zip(ours, x.to(torch.float64).numpy(), strict=True):
        theirs = gfloat.quantize_block(info, values, gfloat.compute_scale_amax)
        np.testing.assert_array_equal(row, theirs)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_and_scales_equal_torchao(
    element: ElementFormat, mode: ScaleMode, dtype: torch.dtype
) -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    x = (torch.randn(500, 64) * torch.exp2(torch.linspace(-90, 90, 500)).unsqueeze(1)).to(dtype)
    quantized = QUANTISERS[element.name][0](x, group=32, scale_mode=mode)
    torch_type = torch.float8_e4m3fn if element is E4M3FN else torch.float4_e2m1fn_x2
    scale, codes = mx_tensor.to_mx(x, torch_type, 32, mx_tensor.ScaleCalculationMode[mode.upper()])
    if element is E2M1FN:
        codes = kernels.unpack_uint4(codes)
    assert torch.equal(quantized.scale_MG, scale.view(torch.uint8))
    np.testing.assert_array_equal(raw_codes(quantized), codes.view(torch.uint8).numpy())


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_zero_subnormal_nan_and_infinite_groups(
    element: ElementFormat, mode: ScaleMode, device: torch.device
) -> None:
    x = torch.ones(6, 32, device=device)
    x[0] = 0.0
    x[1] = 0.0
    x[1, 3], x[1, 4] = 2.0**-127, -(2.0**-149)
    x[2, 7] = torch.nan
    x[3, 7] = torch.inf
    x[4, 7] = -torch.inf
    x[5, :16], x[5, 16:] = torch.inf, torch.nan
    quantise, dequantise = QUANTISERS[element.name]
    quantized = quantise(x, group=32, scale_mode=mode)
    assert quantized.scale_MG.flatten().tolist() == [0, 0, 255, 255, 255, 255]
    assert np.count_nonzero(raw_codes(quantized)[[0, 2, 3, 4, 5]]) == 0
    values = dequantise(quantized)
    assert torch.equal(values[0], x[0])
    assert values[1, 3] == 2.0**-127
    assert bool(values[2:].isnan().all())


def test_group_max_500_is_clipped_by_floor_and_kept_by_rceil(device: torch.device) -> None:
    x = torch.zeros(1, 32, device=device)
    x[0, 0] = 500.0
    floor = dequantize_mxfp8(quantize_mxfp8(x, group=32, scale_mode="floor"))
    rceil = dequantize_mxfp8(quantize_mxfp8(x, group=32, scale_mode="rceil"))
    assert (floor[0, 0].item(), rceil[0, 0].item()) == (448.0, 512.0)


@pytest.mark.parametrize("element", ELEMENTS)
def test_leading_axes_other_groups_and_strides(element: ElementFormat) -> None:
    quantise, _ = QUANTISERS[element.name]
    x = torch.randn(3, 5, 48)
    whole = quantise(x, group=16, scale_mode="rceil")
    assert (whole.codes_MK.shape, whole.scale_MG.shape) == ((3, 5, 48), (3, 5, 3))
    for i in range(3):
        part = quantise(x[i], group=16, scale_mode="rceil")
        np.testing.assert_array_equal(raw_codes(whole)[i], raw_codes(part))
    strided = quantise(x.transpose(0, 1), group=16, scale_mode="rceil")
    assert torch.equal(strided.scale_MG.transpose(0, 1), whole.scale_MG)
    empty = quantise(torch.zeros(0, 48), group=16, scale_mode="rceil")
    assert (empty.codes_MK.shape, empty.scale_MG.shape) == ((0, 48), (0, 3))


@pytest.mark.parametrize("element", ELEMENTS)
def test_bad_arguments_are_refused(element: ElementFormat) -> None:
    quantise, _ = QUANTISERS[element.name]
    with pytest.raises(ValueError, match="K must be a multiple of a positive group, got K=33"):
        quantise(torch.ones(2, 33), group=32, scale_mode="rceil")
    with pytest.raises(TypeError, match="must be bfloat16 or float32, got"):
        quantise(torch.ones(2, 32, dtype=torch.float64), group=32, scale_mode="rceil")
    with pytest.raises((ValueError, TypeError), match="'round'"):
        quantise(torch.ones(2, 32), group=32, scale_mode="round")
    with pytest.raises(TypeError):
        quantise(torch.ones(2, 32), group=32)
