"""The 128x4 layout against its formula and torchao."""

import pytest
import torch

from titan_lowprec.formats.swizzle import swizzle_128x4, unswizzle_128x4

SHAPES = [(128, 4), (1, 1), (129, 5), (127, 3), (256, 8), (300, 10), (64, 4), (128, 12)]


def table_of(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Bytes 1 to 251, so that padding shows."""
    values = torch.arange(rows * columns, device=device) % 251 + 1
    return values.reshape(rows, columns).to(torch.uint8)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_byte_is_where_the_formula_says(
    rows: int, columns: int, device: torch.device
) -> None:
    table = table_of(rows, columns, device)
    swizzled = swizzle_128x4(table)
    column_tiles = -(-columns // 4)
    expected = torch.zeros(-(-rows // 128) * column_tiles * 512, dtype=torch.uint8)
    host = table.tolist()
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * column_tiles + c // 4
            inside = (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            expected[tile * 512 + inside] = host[r][c]
    assert torch.equal(swizzled.cpu(), expected)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unswizzle_is_the_inverse(rows: int, columns: int, device: torch.device) -> None:
    table = table_of(rows, columns, device)
    assert torch.equal(unswizzle_128x4(swizzle_128x4(table), rows=rows, columns=columns), table)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_layout_equals_torchao_to_blocked(rows: int, columns: int) -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    table = table_of(rows, columns, torch.device("cpu"))
    blocked = utils.to_blocked(table)
    assert torch.equal(swizzle_128x4(table), blocked.flatten())
    if rows % 128 == 0 and columns % 4 == 0:
        assert torch.equal(utils.from_blocked(blocked, rows, columns), table)


def test_empty_tables_and_strided_tables() -> None:
    empty = torch.zeros(0, 4, dtype=torch.uint8)
    assert swizzle_128x4(empty).numel() == 0
    assert unswizzle_128x4(swizzle_128x4(empty), rows=0, columns=4).shape == (0, 4)
    table = table_of(8, 40, torch.device("cpu"))
    assert torch.equal(swizzle_128x4(table.T), swizzle_128x4(table.T.contiguous()))


def test_a_wrong_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="a 129x4 table takes 1024 bytes, got 512"):
        unswizzle_128x4(torch.zeros(512, dtype=torch.uint8), rows=129, columns=4)
