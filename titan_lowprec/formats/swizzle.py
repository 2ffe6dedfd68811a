"""The 128x4 layout in which cuBLAS and tcgen05 read block scales: export and import."""

from titan_lowprec.shapes import Tensor, UInt8

_TILE_ROWS = 128
_TILE_COLUMNS = 4
_TILE_LANES = 32


def swizzle_128x4(scale_RC: UInt8[Tensor, "R C"]) -> UInt8[Tensor, " bytes"]:
    """Lay scale bytes out in the 128x4 tiles that cuBLAS and tcgen05 read.

    Args:
        scale_RC: One byte per matrix row and scale group.

    Returns:
        ``ceil(R / 128) * ceil(C / 4) * 512`` bytes. Byte ``(r % 32) * 16 + (r // 32) * 4 + c`` of
        a tile holds its element ``(r, c)``; tiles follow one another along columns first; padded
        bytes are 0.

    Numerics:
        Exact.

    Source:
        NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    R, C = scale_RC.shape
    row_tiles, column_tiles = -(-R // _TILE_ROWS), -(-C // _TILE_COLUMNS)
    padded = scale_RC.new_zeros((row_tiles * _TILE_ROWS, column_tiles * _TILE_COLUMNS))
    padded[:R, :C] = scale_RC
    tiles = padded.view(
        row_tiles, _TILE_ROWS // _TILE_LANES, _TILE_LANES, column_tiles, _TILE_COLUMNS
    )
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_128x4(
    swizzled: UInt8[Tensor, " bytes"], *, rows: int, columns: int
) -> UInt8[Tensor, "R C"]:
    """Read scale bytes back from 128x4 tiles.

    Args:
        swizzled: Bytes as ``swizzle_128x4`` wrote them.
        rows: Rows of the scale table, without padding.
        columns: Columns of the scale table, without padding.

    Raises:
        ValueError: The number of bytes does not fit the table.

    Numerics:
        Exact; padded bytes are dropped unread.

    Source:
        NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    row_tiles, column_tiles = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    expected = row_tiles * column_tiles * _TILE_ROWS * _TILE_COLUMNS
    if swizzled.numel() != expected:
        raise ValueError(
            f"unswizzle_128x4: a {rows}x{columns} table takes {expected} bytes, "
            f"got {swizzled.numel()}; pass the rows and columns given to swizzle_128x4"
        )
    tiles = swizzled.view(
        row_tiles, column_tiles, _TILE_LANES, _TILE_ROWS // _TILE_LANES, _TILE_COLUMNS
    )
    table = tiles.permute(0, 3, 2, 1, 4).reshape(
        row_tiles * _TILE_ROWS, column_tiles * _TILE_COLUMNS
    )
    return table[:rows, :columns].contiguous()
