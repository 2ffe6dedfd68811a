"""Square tiles: one scale a tile, the same codes along either axis."""

import pytest
import torch

from titan_lowprec.ops.quantize.api import (
    dequantize_tiles,
    quantize_mxfp8,
    quantize_tiles,
)


def test_every_tile_equals_one_group_of_its_elements(device: torch.device) -> None:
    x = torch.randn(2, 3, 64, 96, device=device) * torch.exp2(
        torch.randint(-30, 30, (2, 3, 64, 96), device=device)
    )
    tiles = quantize_tiles(x, tile=32, scale_mode="rceil")
    assert tiles.scale_GG.shape == (2, 3, 2, 3)
    values = dequantize_tiles(tiles)
    for i in range(2):
        for j in range(3):
            rows, columns = slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32)
            flat = x[..., rows, columns].reshape(6, 1024)
            group = quantize_mxfp8(flat, group=1024, scale_mode="rceil")
            assert torch.equal(tiles.scale_GG[..., i, j].flatten(), group.scale_MG[:, 0])
            codes = tiles.codes_TS[..., rows, columns].reshape(6, 1024)
            assert torch.equal(codes.view(torch.uint8), group.codes_MK.view(torch.uint8))
            exponent = group.scale_MG.to(torch.float64) - 127
            exact = codes.to(torch.float64) * torch.exp2(exponent)
            assert torch.equal(values[..., rows, columns].reshape(6, 1024).double(), exact)


def test_transposing_values_transposes_codes_and_scales(device: torch.device) -> None:
    x = torch.randn(64, 32, device=device)
    tiles = quantize_tiles(x, tile=32, scale_mode="rceil")
    turned = quantize_tiles(x.T, tile=32, scale_mode="rceil")
    assert torch.equal(turned.codes_TS.T.view(torch.uint8), tiles.codes_TS.view(torch.uint8))
    assert torch.equal(turned.scale_GG.T, tiles.scale_GG)


def test_zero_and_bad_tiles_are_marked_alone(device: torch.device) -> None:
    x = torch.ones(64, 64, device=device)
    x[:32, :32] = 0.0
    x[40, 40] = torch.nan
    tiles = quantize_tiles(x, tile=32, scale_mode="rceil")
    assert tiles.scale_GG.flatten().tolist() == [0, 119, 119, 255]
    values = dequantize_tiles(tiles)
    assert bool(values[32:, 32:].isnan().all())
    assert torch.equal(values[:32], x[:32])
    assert int(tiles.codes_TS[32:, 32:].view(torch.uint8).count_nonzero()) == 0


@pytest.mark.parametrize("shape", [(33, 32), (32, 33)], ids=str)
def test_ragged_sizes_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="quantize_tiles"):
        quantize_tiles(torch.ones(shape), tile=32, scale_mode="rceil")
