"""Every code and every bf16 value through the codecs, against ml_dtypes and gfloat."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from titan_lowprec.formats.catalogue import E2M1FN, E4M3FN, ElementFormat
from titan_lowprec.formats.codec import (
    decode_e2m1fn,
    decode_e4m3fn,
    decode_ue8m0,
    encode_e2m1fn,
    encode_e4m3fn,
    pack_e2m1fn,
    unpack_e2m1fn,
)

ELEMENTS = [pytest.param(E4M3FN, id="e4m3fn"), pytest.param(E2M1FN, id="e2m1fn")]
NUMPY_TYPES = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e2m1fn": ml_dtypes.float4_e2m1fn}
GFLOAT_INFOS = {
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e2m1fn": gfloat.formats.format_info_ocp_e2m1,
}


def encode(x: torch.Tensor, element: ElementFormat) -> np.ndarray:
    if element is E4M3FN:
        return encode_e4m3fn(x).view(torch.uint8).cpu().numpy()
    return encode_e2m1fn(x).cpu().numpy()


def decode(codes: np.ndarray, element: ElementFormat, device: torch.device) -> np.ndarray:
    tensor = torch.from_numpy(codes.astype(np.uint8)).to(device)
    if element is E4M3FN:
        return decode_e4m3fn(tensor.view(torch.float8_e4m3fn)).cpu().numpy()
    return decode_e2m1fn(tensor).cpu().numpy()


def ml_dtypes_codes(x: np.ndarray, element: ElementFormat) -> np.ndarray:
    """Clamp, then let ml_dtypes round; NaN is replaced by plus zero."""
    finite = np.where(np.isnan(x), 0.0, np.clip(x, -element.max_value, element.max_value))
    return finite.astype(x.dtype).astype(NUMPY_TYPES[element.name]).view(np.uint8)


def gfloat_codes(x: np.ndarray, element: ElementFormat) -> np.ndarray:
    """Let gfloat round in float64 (a cast to ml_dtypes goes through fp32), saturating."""
    info = GFLOAT_INFOS[element.name]
    wide = x.astype(np.float64)
    return gfloat.encode_ndarray(
        info, gfloat.round_ndarray(info, wide, gfloat.RoundMode.TiesToEven, sat=True)
    )


def all_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def rounding_boundaries(element: ElementFormat) -> np.ndarray:
    """Midpoints of neighbouring values, exactly, both signs."""
    codes = np.arange(2 ** (element.bits - 1))
    values = decode(codes, element, torch.device("cpu")).astype(np.float64)
    values = values[np.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    return np.concatenate([middle, -middle])


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_code_decodes_as_ml_dtypes_and_gfloat_say(
    element: ElementFormat, device: torch.device
) -> None:
    codes = np.arange(2**element.bits, dtype=np.uint8)
    ours = decode(codes, element, device)
    theirs = codes.view(NUMPY_TYPES[element.name]).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[ours == 0]), np.signbit(theirs[theirs == 0]))
    np.testing.assert_array_equal(
        ours, gfloat.decode_ndarray(GFLOAT_INFOS[element.name], codes).astype(np.float32)
    )


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_bf16_value_encodes_as_ml_dtypes_says(
    element: ElementFormat, dtype: torch.dtype, device: torch.device
) -> None:
    x = all_bf16()
    expected = ml_dtypes_codes(x.to(torch.float32).numpy(), element)
    np.testing.assert_array_equal(encode(x.to(dtype).to(device), element), expected)


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_finite_bf16_value_encodes_as_gfloat_says(element: ElementFormat) -> None:
    x = all_bf16().to(torch.float32)
    x = x[torch.isfinite(x)]
    np.testing.assert_array_equal(encode(x, element), gfloat_codes(x.numpy(), element))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_ulp_either_side_of_every_rounding_boundary(
    element: ElementFormat, dtype: type, device: torch.device
) -> None:
    tie = rounding_boundaries(element).astype(dtype)
    above = np.nextafter(tie, np.inf, dtype=dtype)
    below = np.nextafter(tie, -np.inf, dtype=dtype)
    low = decode(encode(torch.from_numpy(below), element), element, torch.device("cpu"))
    high = decode(encode(torch.from_numpy(above), element), element, torch.device("cpu"))
    np.testing.assert_array_equal((low.astype(np.float64) + high) / 2, tie)
    for x in (tie, above, below):
        codes = encode(torch.from_numpy(x).to(device), element)
        np.testing.assert_array_equal(codes, gfloat_codes(x, element))
    assert np.all(encode(torch.from_numpy(tie), element) % 2 == 0)


def test_float64_is_rounded_once(device: torch.device) -> None:
    # Through fp32 this becomes the tie 1.0625, which then goes to the even 1.0.
    x = torch.tensor([1.0625 + 2.0**-40, 1.0625, -1.0625 - 2.0**-40], dtype=torch.float64)
    values = decode_e4m3fn(encode_e4m3fn(x.to(device))).tolist()
    assert values == [1.125, 1.0, -1.125]
    half = torch.tensor([0.25 + 2.0**-40, 0.25, 2.5 + 2.0**-40], dtype=torch.float64)
    assert decode_e2m1fn(encode_e2m1fn(half.to(device))).tolist() == [0.5, 0.0, 3.0]


def test_values_past_the_maximum_saturate_and_nan_becomes_zero(device: torch.device) -> None:
    x = torch.tensor(
        [448.0, 464.0, 465.0, 480.0, 1e30, torch.inf, -torch.inf, torch.nan, -torch.nan],
        device=device,
    )
    assert encode_e4m3fn(x).view(torch.uint8).tolist() == [0x7E] * 6 + [0xFE, 0, 0]
    assert encode_e2m1fn(x).tolist() == [7] * 6 + [15, 0, 0]


def test_signs_of_zero_and_of_values_rounded_to_zero_are_kept(device: torch.device) -> None:
    x = torch.tensor([0.0, -0.0, 2.0**-11, -(2.0**-11), 1e-45, -1e-45], device=device)
    assert encode_e4m3fn(x).view(torch.uint8).tolist() == [0, 0x80] * 3
    assert encode_e2m1fn(x).tolist() == [0, 8] * 3


def test_subnormal_codes_are_used(device: torch.device) -> None:
    x = torch.tensor([2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 7 * 2.0**-9, 2.0**-6], device=device)
    assert encode_e4m3fn(x).view(torch.uint8).tolist() == [1, 0, 2, 7, 8]


@pytest.mark.parametrize("element", ELEMENTS)
def test_rounding_has_no_bias(element: ElementFormat) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(200_000, generator=generator) * element.max_value
    rounded_down = (decode(encode(x, element), element, torch.device("cpu")) < x.numpy()).mean()
    assert abs(rounded_down - 0.5) < 0.01


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="encode_e4m3fn"):
        encode_e4m3fn(torch.ones(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="encode_e2m1fn"):
        encode_e2m1fn(torch.ones(2, dtype=torch.int32))


def test_every_byte_unpacks_low_nibble_first_and_packs_back(device: torch.device) -> None:
    packed = torch.arange(256, dtype=torch.uint8, device=device).reshape(4, 64)
    codes = unpack_e2m1fn(packed)
    assert codes.shape == (4, 128)
    assert torch.equal(codes[..., 0::2], packed % 16)
    assert torch.equal(codes[..., 1::2], packed // 16)
    assert torch.equal(pack_e2m1fn(codes), packed)
    assert pack_e2m1fn(codes).view(torch.float4_e2m1fn_x2).shape == packed.shape


def test_packing_equals_torchao() -> None:
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 1)
    codes = torch.stack((codes.T, codes), dim=-1).reshape(16, 32).contiguous()
    assert torch.equal(pack_e2m1fn(codes), kernels.pack_uint4(codes))


def test_odd_axes_do_not_pack() -> None:
    with pytest.raises(ValueError, match="pack_e2m1fn: the last axis must be even, got 3"):
        pack_e2m1fn(torch.zeros(2, 3, dtype=torch.uint8))


def test_every_ue8m0_byte_decodes_as_ml_dtypes_and_gfloat_say(device: torch.device) -> None:
    codes = np.arange(256, dtype=np.uint8)
    ours = decode_ue8m0(torch.from_numpy(codes).to(device)).cpu().numpy()
    np.testing.assert_array_equal(ours, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    info = gfloat.formats.format_info_ocp_e8m0
    np.testing.assert_array_equal(ours, gfloat.decode_ndarray(info, codes).astype(np.float32))
    assert ours[0] == 2.0**-127
    assert np.isnan(ours[255])


def test_ue8m0_byte_0_is_a_subnormal_even_where_arithmetic_flushes() -> None:
    assert torch.set_flush_denormal(True), "this processor cannot flush subnormals"
    try:
        bits = decode_ue8m0(torch.zeros(64, dtype=torch.uint8)).view(torch.int32)
    finally:
        torch.set_flush_denormal(False)
    assert bits.unique().tolist() == [0x00400000]


@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 0, 2), (2, 5)], ids=str)
def test_shapes_are_kept_and_inputs_may_be_strided(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 1.5)
    assert encode_e4m3fn(x).shape == encode_e2m1fn(x).shape == x.shape
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        encode_e4m3fn(wide.T[::2]).view(torch.uint8),
        encode_e4m3fn(wide.T[::2].contiguous()).view(torch.uint8),
    )
    assert torch.equal(encode_e2m1fn(wide.T[::2]), encode_e2m1fn(wide.T[::2].contiguous()))
    double = wide.T[::2].to(torch.float64)
    assert torch.equal(
        encode_e4m3fn(double).view(torch.uint8), encode_e4m3fn(wide.T[::2]).view(torch.uint8)
    )
