"""Tile shapes of the GEMM kernels, and what their launchers share."""

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_lowprec.shapes import Tensor


@dataclass(frozen=True, slots=True)
class LogitsTile:
    """Shape of the logits GEMM."""

    rows: int
    columns: int
    reduction: int
    warps: int
    stages: int
    split: bool
    """Finish a tile in two halves of its columns, for half the registers and shared memory."""
    resident: int
    """Persistent programs per multiprocessor; 0 starts one program per tile."""


@dataclass(frozen=True, slots=True)
class WeightTile:
    """Shape of the weight-gradient GEMM: vocabulary ``columns`` by model ``width``."""

    columns: int
    width: int
    reduction: int
    warps: int
    stages: int
    split: bool
    resident: int


LOGITS = LogitsTile(128, 256, 64, warps=8, stages=3, split=True, resident=1)
WEIGHT = WeightTile(128, 256, 64, warps=8, stages=3, split=True, resident=1)


def descriptor(x_MK: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Tensor-memory descriptor of a row-major matrix whose rows start on 16 bytes."""
    row_bytes = x_MK.stride(0) * x_MK.element_size()
    assert x_MK.stride(1) == 1 and row_bytes % 16 == 0 and x_MK.data_ptr() % 16 == 0
    return TensorDescriptor(x_MK, list(x_MK.shape), list(x_MK.stride()), list(block))


def programs(tiles: int, device: torch.device, resident: int) -> int:
    """Programs to start: one per tile, or ``resident`` on each multiprocessor."""
    if resident == 0 or device.type == "cpu":
        return tiles
    return resident * torch.cuda.get_device_properties(device).multi_processor_count
