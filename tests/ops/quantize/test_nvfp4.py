"""NVFP4 against exact comparisons in float64, and torchao."""

import ml_dtypes
import numpy as np
import pytest
import torch

from titan_lowprec.formats.catalogue import NVFP4_MAX
from titan_lowprec.ops.quantize.api import dequantize_nvfp4, quantize_nvfp4

E4M3_VALUES = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1_VALUES = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def nearest_code(x: np.ndarray, values: np.ndarray, unit: np.ndarray | float) -> np.ndarray:
    """Index of the value nearest to ``x / unit``, ties to even, without dividing.

    Every midpoint has at most 5 significant bits and every unit at most 4, so the products are
    exact in float64.
    """
    middle = (values[1:] + values[:-1]) / 2
    boundary = middle * np.asarray(unit, np.float64)[..., None]
    above = (x[..., None] > boundary).sum(-1)
    tie = (x[..., None] == boundary).any(-1)
    return above + (tie & (above % 2 == 1))


def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, 16)
    scale = nearest_code(np.abs(groups).max(-1), E4M3_VALUES, 6.0).clip(1)
    unit = np.broadcast_to(E4M3_VALUES[scale][..., None], groups.shape)
    codes = nearest_code(np.abs(groups), E2M1_VALUES, unit) + 8 * np.signbit(groups)
    return codes.reshape(x.shape).astype(np.uint8), scale.astype(np.uint8)


def groups_under_every_bf16_maximum() -> torch.Tensor:
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rest = amax.to(torch.float32).unsqueeze(1) * (2 * torch.rand(len(amax), 15) - 1)
    return torch.cat([rest.to(torch.bfloat16), amax.unsqueeze(1)], dim=1)


def groups_beside_boundaries() -> torch.Tensor:
    """For every scale: elements within an ulp of every code boundary, maxima beside its own."""
    scale = E4M3_VALUES[1:].astype(np.float32)
    middle = ((E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2).astype(np.float32)
    tie = scale[:, None] * middle
    near = np.stack([np.nextafter(tie, np.float32(0)), tie, np.nextafter(tie, np.float32(1e9))])
    elements = np.concatenate([near[0], -near[1], near[2], -near[0], near[1]], axis=1)[:, :30]
    elements = elements.reshape(-1, 2, 15)
    maxima = np.stack([6 * scale, -6 * scale], axis=1)[..., None]
    on_scale = np.concatenate([elements, maxima], axis=2).reshape(-1, 16)
    edge = 3 * (scale[1:] + scale[:-1])
    off = np.stack([np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(1e9))])
    off = np.repeat(off.reshape(-1, 1), 16, axis=1)
    return torch.from_numpy(np.concatenate([on_scale, off]))


@pytest.mark.parametrize("groups", [groups_under_every_bf16_maximum, groups_beside_boundaries])
def test_codes_and_scales_are_the_nearest(groups, device: torch.device) -> None:
    x = groups()
    quantized = quantize_nvfp4(x.to(device), group=16, outer="none")
    codes, scale = expected(x.to(torch.float32).numpy())
    np.testing.assert_array_equal(quantized.scale_MG.view(torch.uint8).cpu().numpy(), scale)
    np.testing.assert_array_equal(quantized.codes_MK.cpu().numpy(), codes)
    assert bool((quantized.outer_M == 127).all())
    assert quantized.saturated.item() == int((x.to(torch.float64).abs() > NVFP4_MAX).sum())

    signed = np.where(codes >= 8, -1.0, 1.0) * E2M1_VALUES[codes % 8]
    exact = signed * E4M3_VALUES[scale].repeat(16, -1)
    np.testing.assert_array_equal(dequantize_nvfp4(quantized).cpu().numpy(), exact)


def test_scales_equal_torchao_and_codes_differ_only_on_its_inexact_ties() -> None:
    nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    # Below 6 * 2**-6 torchao keeps the smallest normal scale; ours goes down to 2**-9.
    x = groups_under_every_bf16_maximum()
    x = x[x[:, -1] >= 6 * 2.0**-6].contiguous()
    ours = quantize_nvfp4(x, group=16, outer="none")
    scale, packed = nvfp4_tensor.nvfp4_quantize(x, 16)
    assert torch.equal(ours.scale_MG.view(torch.uint8), scale.view(torch.uint8))
    # torchao multiplies by a rounded reciprocal, so it may miss a tie; never more than that.
    differ = (ours.codes_MK != kernels.unpack_uint4(packed)).numpy()
    unit = ours.scale_MG.to(torch.float64).repeat_interleave(16, dim=-1).numpy()
    middle = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2
    magnitude = np.abs(x.to(torch.float64).numpy())
    tie = (magnitude[..., None] == middle * unit[..., None]).any(-1)
    assert not (differ & ~tie).any()
    assert differ.mean() < 0.01


def test_outer_exponent_keeps_values_that_plain_nvfp4_saturates(device: torch.device) -> None:
    x = torch.tensor([[2688.0], [2689.0], [1e30], [1e-30]], device=device).expand(4, 16)
    plain = quantize_nvfp4(x, group=16, outer="none")
    assert plain.saturated.item() == 32
    assert dequantize_nvfp4(plain)[:, 0].tolist() == [2688.0, 2688.0, 2688.0, 0.0]
    scaled = quantize_nvfp4(x, group=16, outer="token")
    assert scaled.saturated.item() == 0
    assert scaled.outer_M.tolist()[:2] == [127, 128]
    torch.testing.assert_close(dequantize_nvfp4(scaled), x, rtol=0.0625, atol=0.0)


def test_outer_exponent_is_a_power_of_two_of_the_token_alone(device: torch.device) -> None:
    x = torch.randn(7, 64, device=device) * torch.exp2(torch.arange(-30.0, 40.0, 10.0)).to(
        device
    ).unsqueeze(1)
    together = quantize_nvfp4(x, group=16, outer="token")
    for i in range(7):
        alone = quantize_nvfp4(x[i : i + 1], group=16, outer="token")
        assert torch.equal(alone.codes_MK[0], together.codes_MK[i])
        assert torch.equal(alone.outer_M[0], together.outer_M[i])
    factor = torch.exp2(together.outer_M.to(torch.float32) - 127).unsqueeze(1)
    inner = quantize_nvfp4(x / factor, group=16, outer="none")
    assert torch.equal(inner.codes_MK, together.codes_MK)


def test_zero_nan_and_infinite_groups(device: torch.device) -> None:
    x = torch.zeros(4, 32, device=device)
    x[1, 3] = torch.nan
    x[2, 20] = -torch.inf
    x[3, :] = 1.0
    plain = quantize_nvfp4(x, group=16, outer="none")
    assert plain.scale_MG.view(torch.uint8).tolist()[:3] == [[1, 1], [0x7F, 1], [1, 0x7F]]
    assert int(plain.codes_MK[:3].count_nonzero()) == 0
    assert plain.saturated.item() == 0
    values = dequantize_nvfp4(plain)
    assert values.isnan().sum(-1).tolist() == [0, 16, 16, 0]
    outer = quantize_nvfp4(x, group=16, outer="token")
    assert outer.outer_M.tolist()[:3] == [0, 255, 255]
    assert dequantize_nvfp4(outer).isnan().sum(-1).tolist() == [0, 32, 32, 0]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="got K=24, group=16"):
        quantize_nvfp4(torch.ones(2, 24), group=16, outer="none")
    with pytest.raises((ValueError, TypeError), match="'tensor'"):
        quantize_nvfp4(torch.ones(2, 32), group=16, outer="tensor")
