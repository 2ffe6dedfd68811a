"""Launchers of the attention kernels: the signatures of the reference, on a CUDA device."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TileDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_lowprec.ops.attention.common import (
    SAVED_SLOTS,
    Gradients,
    Saved,
    empty_slot,
    score_factor,
)
from titan_lowprec.ops.attention.kernel.backward import (
    attention_backward_keys,
    attention_backward_queries,
)
from titan_lowprec.ops.attention.kernel.forward import attention_forward
from titan_lowprec.ops.attention.kernel.queries_sm90 import attention_backward_queries_sm90
from titan_lowprec.ops.attention.kernel.support import (
    check_supported,
    forward_launch,
    has_descriptors,
    keys_launch,
    placed_by_hand,
    queries_launch,
)
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.quantize.kernel import (
    Nvfp4Codes,
    interpreted,
    quantize_gradient,
    quantize_mixed_operand,
    quantize_operand,
    scale_columns,
    transpose_codes,
    widen_nvfp4,
    work_lists,
)
from titan_lowprec.shapes import Float, Int32, Tensor


def _rows(x_NHD: Tensor, rows: int) -> Tensor | TensorDescriptor:
    """Tokens of one head as tiles of ``rows``; a pointer where features need padding."""
    N, H, D = x_NHD.shape
    if not has_descriptors(D):
        return x_NHD
    return TensorDescriptor(x_NHD, [N, H * D], [H * D, 1], [rows, D])


def _resident_rows(x_NHD: Tensor, rows: int) -> Tensor | TensorDescriptor:
    """The same for what a program loads once: codes come through pointers."""
    return x_NHD if x_NHD.element_size() == 1 else _rows(x_NHD, rows)


def _columns(x_HDC: Tensor, columns: int) -> Tensor | TensorDescriptor:
    """Transposed codes of one head as tiles of ``columns``."""
    if x_HDC.ndim != 3:
        return x_HDC
    H, D, C = x_HDC.shape
    if not has_descriptors(D):
        return x_HDC
    return TensorDescriptor(x_HDC, [H * D, C], [C, 1], [D, columns])


def _by_hand(tile: TensorDescriptor) -> TileDescriptor:
    """The same tile for a kernel that says where it lies in shared memory."""
    layout = gl.NVMMASharedLayout.get_default_for(tile.block_shape, gl.float8e4nv)
    return TileDescriptor(tile.base, tile.shape, tile.strides, tile.block_shape, layout)


def _lists(
    cu_seqlens_RM: Tensor, total_tokens: int, spec: AttentionSpec, *units: tuple[int, str]
) -> list[Tensor]:
    """Token blocks as they lie, then the given units, longest first."""
    causal = spec.mask == "causal"
    ordered = [(unit, order if causal else "full") for unit, order in units]
    return work_lists(cu_seqlens_RM, total_tokens=total_tokens, lists=[(32, "document"), *ordered])


def _scales(scale_NH: Tensor, blocks: Tensor, spec: AttentionSpec, *, fold: bool = False) -> Tensor:
    """Scales of the operand that lies along a tile's columns, as the kernels read them."""
    if not spec.quantised:
        return scale_NH
    return scale_columns(scale_NH, blocks, scales=spec.scales, fold=fold)


def build_lists(
    q_NHD: Float[Tensor, "N H D"], cu_seqlens_RM: Int32[Tensor, "R M1"], spec: AttentionSpec
) -> None:
    """Build the work lists of one forward and one backward and drop them, for benchmarks.

    Numerics:
        None.

    Source:
        ``ops/quantize/kernel/work_items.py``.
    """
    N, _, D = q_NHD.shape
    _lists(cu_seqlens_RM, N, spec, (forward_launch(spec, D).rows, "queries"))
    backward = (keys_launch(spec, D).rows, "keys"), (queries_launch(spec, D).rows, "queries")
    _lists(cu_seqlens_RM, N, spec, *backward)


@dataclass(frozen=True, slots=True)
class EncodedOperands:
    """What the forward makes of q, k and v."""

    slots: dict[str, Tensor]
    """Every slot of ``Saved`` that depends on the inputs alone."""
    v_transposed_HDC: Tensor
    """Transposed codes of V; empty under ``bf16``."""


def encode_operands(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    blocks: Int32[Tensor, "items 4"],
    spec: AttentionSpec,
) -> EncodedOperands:
    """Operands of the products: codes, or bf16 values under the ``bf16`` recipe.

    Numerics:
        ``ops/attention/README.md``, "Operands".

    Source:
        arXiv:2611.03344, section 3.1.
    """
    inputs = {"q": q_NHD, "k": k_NJD, "v": v_NJD}
    none = empty_slot(torch.uint8, q_NHD.device)
    slots = dict.fromkeys(SAVED_SLOTS[3:], none)
    if not spec.quantised:
        values = {f"{name}_codes": x.to(torch.bfloat16) for name, x in inputs.items()}
        return EncodedOperands(slots | values, none)
    operands = {
        "v": quantize_operand(v_NJD, blocks, scales=spec.scales, rotate=False, transpose=True)
    }
    for name in "qk":
        x, rotate = inputs[name], spec.rotate
        if spec.recipe == "nvfp4_mixed":
            mixed = quantize_mixed_operand(x, blocks, scales=spec.scales, rotate=rotate)
            operands[name] = mixed.blocks
            slots |= {
                f"{name}4_codes": mixed.four.packed_NHP,
                f"{name}4_scale": mixed.four.scale_NHG,
            }
        else:
            operands[name] = quantize_operand(
                x, blocks, scales=spec.scales, rotate=rotate, transpose=False
            )
    for name, operand in operands.items():
        slots |= {f"{name}_codes": operand.codes_NHD, f"{name}_scale": operand.scale_NH}
    return EncodedOperands(slots, operands["v"].transposed_HDC)


def score_rows(slots: Mapping[str, Tensor], spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Q and K as the products of scores take them, from the saved slots.

    Numerics:
        Codes, or bf16 values; under ``nvfp4_mixed`` the exact values of the 4-bit codes, which
        both directions make anew: two bytes an element that no forward keeps for its backward.

    Source:
        ``README.md`` beside this file, "NVFP4 scores".
    """
    if spec.recipe != "nvfp4_mixed":
        return slots["q_codes"], slots["k_codes"]
    dtype = torch.float32 if interpreted() else torch.bfloat16
    q, k = (
        widen_nvfp4(Nvfp4Codes(slots[f"{name}4_codes"], slots[f"{name}4_scale"]), dtype)
        for name in "qk"
    )
    return q, k


def encode_all(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    grad_out_NHD: Float[Tensor, "N H D"],
    saved: Saved,
    spec: AttentionSpec,
) -> None:
    """Do the quantisation of one forward and one backward and drop it, for benchmarks.

    Numerics:
        As ``forward_triton`` and ``backward_triton``.

    Source:
        arXiv:2611.03344, section 4: times include quantisation.
    """
    (blocks,) = _lists(cu_seqlens_RM, q_NHD.shape[0], spec)
    slots = encode_operands(q_NHD, k_NJD, v_NJD, blocks, spec).slots
    for fold in (True, False):  # of the forward, of the backward
        score_rows(slots, spec)
        for name in ("k_scale", "v_scale") if fold else ("q_scale", "k_scale", "v_scale"):
            _scales(slots[name], blocks, spec, fold=fold and name == "v_scale")
    quantize_gradient(
        grad_out_NHD, saved.out_NHD, saved.out_low, saved.lse2_NH, blocks, scales=spec.scales
    )
    transpose_codes(saved.q_codes, blocks)
    transpose_codes(saved.k_codes, blocks)


def forward_triton(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    spec: AttentionSpec,
) -> Saved:
    """Compute what ``forward_reference`` computes, without reading the offsets on the host.

    Args:
        q_NHD: Queries of packed rows, contiguous.
        k_NJD: Keys, contiguous.
        v_NJD: Values, contiguous.
        cu_seqlens_RM: Document offsets of each row, relative to the row.
        spec: What to compute; see ``unsupported_reason``.

    Raises:
        ValueError: The kernels do not support ``spec``, the head dimension or the device.

    Numerics:
        ``ops/attention/README.md``, "Formulas, forward", ``fold="hopper"``. Products of codes
        accumulate in the tensor core over one tile, then in fp32.

    Source:
        arXiv:2611.03344, sections 3.1-3.6.
    """
    check_supported("forward_triton", spec, q_NHD)
    N, H, D = q_NHD.shape
    J = k_NJD.shape[1]
    device = q_NHD.device
    launch = forward_launch(spec, D)
    blocks, items = _lists(cu_seqlens_RM, N, spec, (launch.rows, "queries"))
    encoded = encode_operands(q_NHD, k_NJD, v_NJD, blocks, spec)
    slots = encoded.slots
    q, k = score_rows(slots, spec)
    residual = spec.output_residual and q_NHD.dtype == torch.bfloat16
    out = torch.empty_like(q_NHD)
    low = torch.empty_like(q_NHD) if residual else empty_slot(torch.bfloat16, device)
    lse2 = torch.empty((N, H), dtype=torch.float32, device=device)
    v_tiles = (
        _columns(encoded.v_transposed_HDC, spec.tile_k)
        if spec.quantised
        else _rows(slots["v_codes"], spec.tile_k)
    )
    attention_forward[(items.shape[0], H)](
        _resident_rows(q, launch.rows), _rows(k, spec.tile_k), v_tiles,
        slots["q_scale"], _scales(slots["k_scale"], blocks, spec),
        _scales(slots["v_scale"], blocks, spec, fold=True), out, low, lse2, items,
        32 * blocks.shape[0], score_factor(D),
        H=H, J=J, D=D, BLOCK_D=triton.next_power_of_2(D),
        BLOCK_M=launch.rows, BLOCK_N=spec.tile_k, STAGES=launch.stages,
        FP8=spec.quantised, WIDE=spec.recipe == "nvfp4_mixed",
        CAUSAL=spec.mask == "causal", TOKEN=spec.scales == "token",
        RESIDUAL=residual, WEIGHT_EXPONENT=spec.weight_exponent, MAX_LAG=spec.max_lag,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers,
    )  # fmt: skip
    return Saved(out_NHD=out, lse2_NH=lse2, out_low=low, **slots)


def backward_triton(
    grad_out_NHD: Float[Tensor, "N H D"],
    saved: Saved,
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    spec: AttentionSpec,
) -> Gradients:
    """Compute what ``backward_reference`` computes, without reading the offsets on the host.

    Args:
        grad_out_NHD: Gradient of the output, contiguous.
        saved: What the forward of either implementation saved under the same specification.
        cu_seqlens_RM: The forward's document offsets.
        spec: The forward's specification.

    Raises:
        ValueError: As ``forward_triton``.

    Numerics:
        ``ops/attention/README.md``, "Formulas, backward", groups ``line``. Every gradient is
        summed by one program in a fixed order: equal inputs give equal bits.

    Source:
        arXiv:2611.03344, sections 3.1-3.6.
    """
    check_supported("backward_triton", spec, saved.out_NHD)
    N, H, D = saved.out_NHD.shape
    J = saved.k_codes.shape[1]
    keys, queries = keys_launch(spec, D), queries_launch(spec, D)
    blocks, key_items, query_items = _lists(
        cu_seqlens_RM, N, spec, (keys.rows, "keys"), (queries.rows, "queries")
    )
    grad = grad_out_NHD if spec.quantised else grad_out_NHD.to(torch.bfloat16)
    g = quantize_gradient(
        grad, saved.out_NHD, saved.out_low, saved.lse2_NH, blocks,
        scales=spec.scales if spec.quantised else None,
    )  # fmt: skip
    q, k = score_rows(dict(zip(SAVED_SLOTS, saved.tensors(), strict=True)), spec)
    none = empty_slot(torch.uint8, saved.out_NHD.device)
    qt = transpose_codes(saved.q_codes, blocks) if spec.quantised else none
    kt = transpose_codes(saved.k_codes, blocks) if spec.quantised else none
    dq = torch.empty_like(saved.out_NHD)
    dk, dv = (torch.empty((N, J, D), dtype=dq.dtype, device=dq.device) for _ in range(2))
    common = {
        "H": H, "J": J, "D": D, "BLOCK_D": triton.next_power_of_2(D),
        "FP8": spec.quantised, "WIDE": spec.recipe == "nvfp4_mixed",
        "CAUSAL": spec.mask == "causal",
        "TOKEN": spec.scales == "token", "ROTATE": spec.rotate,
        "PRODUCT_TYPE": tl.float32 if interpreted() else tl.bfloat16,
    }  # fmt: skip
    k_scale = _scales(saved.k_scale, blocks, spec)
    factors = (32 * blocks.shape[0], score_factor(D), D**-0.5)
    attention_backward_keys[(key_items.shape[0], J)](
        _rows(q, spec.tile_q), _resident_rows(k, keys.rows),
        _resident_rows(saved.v_codes, keys.rows), _rows(g.codes_NHD, spec.tile_q),
        _columns(qt, spec.tile_q), _columns(g.transposed_HDC, spec.tile_q),
        _scales(saved.q_scale, blocks, spec), saved.k_scale, saved.v_scale,
        g.terms_HC2, dk, dv, key_items, *factors,
        BLOCK_M=spec.tile_q, BLOCK_N=keys.rows, STAGES=keys.stages,
        num_warps=keys.warps, num_stages=keys.stages, maxnreg=keys.registers, **common,
    )  # fmt: skip
    rest = (
        saved.q_scale, k_scale, _scales(saved.v_scale, blocks, spec), g.scale_NH,
        saved.lse2_NH, g.terms_HC2, dq, query_items, *factors,
    )  # fmt: skip
    tiles_of_keys = (
        _rows(k, spec.tile_k), _rows(saved.v_codes, spec.tile_k), _columns(kt, spec.tile_k)
    )  # fmt: skip
    if placed_by_hand(spec, D):
        q_tile, g_tile = _rows(q, queries.rows), _rows(g.codes_NHD, queries.rows)
        k_tile, v_tile, kt_tile = (_by_hand(tile) for tile in tiles_of_keys)
        attention_backward_queries_sm90[(query_items.shape[0], H)](
            _by_hand(q_tile), k_tile, v_tile, _by_hand(g_tile), kt_tile, *rest,
            H=H, J=J, D=D, BLOCK_M=queries.rows, CAUSAL=common["CAUSAL"], TOKEN=common["TOKEN"],
            ROTATE=spec.rotate, num_warps=queries.warps, maxnreg=queries.registers,
        )  # fmt: skip
    else:
        k_tile, v_tile, kt_tile = tiles_of_keys
        attention_backward_queries[(query_items.shape[0], H)](
            _resident_rows(q, queries.rows), k_tile, v_tile,
            _resident_rows(g.codes_NHD, queries.rows), kt_tile, *rest,
            BLOCK_M=queries.rows, BLOCK_N=spec.tile_k, STAGES=queries.stages,
            num_warps=queries.warps, num_stages=queries.stages, maxnreg=queries.registers,
            **common,
        )  # fmt: skip
    return Gradients(dq, dk, dv)
