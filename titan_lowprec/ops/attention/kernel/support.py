"""Which calls the attention kernels take, and with which tiles they run."""

from dataclasses import dataclass

import torch

from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.quantize.kernel import interpreted
from titan_lowprec.shapes import Tensor

TESTED_CAPABILITIES = ((9, 0),)
"""CUDA compute capabilities on which the tests are run; ``README.md`` has the last result."""

RECIPES = ("bf16", "mxfp8", "nvfp4_mixed")
HEAD_DIMS = (64, 96, 128)
TILE_SIZES = (64, 128)


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile rows (columns come from the specification), warps, pipeline stages and, where the
    number of programs on a multiprocessor hangs on it, the most registers of a thread.

    One launch per recipe and head dimension, never a function of lengths or document counts: a
    document gets the same bits alone and in any row.
    """

    rows: int
    warps: int
    stages: int
    registers: int | None = None


def has_descriptors(head_dim: int) -> bool:
    """Whether tiles are loaded with tensor descriptors; otherwise with pointers, padded."""
    return head_dim & (head_dim - 1) == 0


def forward_launch(spec: AttentionSpec, head_dim: int) -> Launch:
    """Rows are queries. Three programs of 64 rows share a multiprocessor and hide each other.

    Wide tiles of 128 keys in three stages would leave room for one. With 64 features five programs
    fit (strict scales: four), three of wide tiles. Told nothing, ptxas takes too many registers for
    three with strict scales; at 168 eight bytes spill, outside the loop.
    """
    strict = spec.scales == "token"
    if spec.recipe == "mxfp8" and has_descriptors(head_dim):
        small = head_dim == 64
        if spec.tile_k == 64 and small:
            return Launch(rows=64, warps=4, stages=2, registers=128 if strict else 96)
        if (strict and spec.tile_k == 64) or (small and not strict):
            return Launch(rows=64, warps=4, stages=3, registers=168)
    large = spec.recipe == "nvfp4_mixed" and spec.tile_k == 128
    return Launch(rows=64, warps=4, stages=2 if large else 3)


def keys_launch(spec: AttentionSpec, head_dim: int) -> Launch:
    """Rows are keys, columns ``tile_q`` queries.

    Loads of a second stage are issued where the tile before has ended, so a third hides their
    latency. Two programs of three stages just fit a multiprocessor if operands are 8-bit and the
    scales are few; with pointers their registers spill. With 64 features a third program does more
    than a third stage.
    """
    if spec.recipe != "mxfp8" or spec.tile_q != 64 or not has_descriptors(head_dim):
        return Launch(rows=64, warps=4, stages=2)
    if head_dim == 64:
        return Launch(rows=64, warps=4, stages=2, registers=168)
    return Launch(rows=64, warps=4, stages=3 if spec.scales == "token_block" else 2)


def placed_by_hand(spec: AttentionSpec, head_dim: int) -> bool:
    """Whether dQ is that of ``queries_sm90.py``, which no interpreter runs."""
    return (
        spec.recipe == "mxfp8"
        and spec.tile_k == 64
        and has_descriptors(head_dim)
        and not interpreted()
    )


def queries_launch(spec: AttentionSpec, head_dim: int) -> Launch:
    """Rows are queries. With two stages and few registers three programs fit, four of 64 features.

    Where Triton places the loads, strict scales and pointers need more registers: two programs
    then, and a third stage.
    """
    small = head_dim == 64
    if placed_by_hand(spec, head_dim):
        return Launch(rows=64, warps=4, stages=2, registers=128 if small else 168)
    if spec.recipe != "mxfp8":
        return Launch(rows=64, warps=4, stages=2)
    if spec.scales == "token_block" and has_descriptors(head_dim):
        return Launch(rows=64, warps=4, stages=2, registers=168 if small else None)
    return Launch(rows=64, warps=4, stages=3 if spec.tile_k == 64 else 2)


def unsupported_reason(
    spec: AttentionSpec,
    *,
    head_dim: int,
    device: torch.device,
    allow_untested: bool = False,
) -> str | None:
    """Say why the kernels do not take a call, or None.

    Args:
        spec: What the call computes.
        head_dim: Its head dimension.
        device: Where it would run.
        allow_untested: Accept CUDA architectures on which nobody has run the tests.

    Numerics:
        None.

    Source:
        `README.md` beside this file.
    """
    fixed: dict[str, object] = {"dq_accum": "fp32", "centring": False, "row_sum": "unrounded"}
    fixed |= {"delta_gradient": "as_in_dp"}
    if spec.quantised:
        fixed |= {"fold": "hopper", "gradient_groups": "line", "dv_exponent": "tile"}
    if spec.recipe not in RECIPES:
        return f"recipe must be in {RECIPES}, got {spec.recipe!r}"
    for name, value in fixed.items():
        if getattr(spec, name) != value:
            return f"{name} must be {value!r}, got {getattr(spec, name)!r}"
    if spec.tile_q not in TILE_SIZES or spec.tile_k not in TILE_SIZES:
        return f"tile_q and tile_k must be in {TILE_SIZES}, got {spec.tile_q} and {spec.tile_k}"
    if head_dim not in HEAD_DIMS:
        return f"the head dimension must be in {HEAD_DIMS}, got {head_dim}"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"the kernels need a CUDA device, got {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability not in TESTED_CAPABILITIES and not allow_untested:
        return (
            f"the compute capability must be in {TESTED_CAPABILITIES}, where the kernels are "
            f"tested, got {capability}"
        )
    return None


def check_supported(who: str, spec: AttentionSpec, q: Tensor) -> None:
    """Raise where ``unsupported_reason`` finds one."""
    reason = unsupported_reason(spec, head_dim=q.shape[-1], device=q.device)
    if reason is not None:
        raise ValueError(f"{who}: {reason}; use impl='reference'")
