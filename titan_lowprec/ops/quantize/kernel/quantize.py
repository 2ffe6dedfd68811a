"""Fused token-block quantisation: rotation, maximum, scale byte, codes, transposed codes."""

from dataclasses import dataclass, replace

import torch
import triton

from titan_lowprec.formats.token_blocks import BLOCK_TOKENS
from titan_lowprec.ops.quantize.common import BlockScales
from titan_lowprec.ops.quantize.kernel.nvfp4 import Nvfp4Codes, empty_nvfp4
from titan_lowprec.ops.quantize.kernel.passes import quantize_columns, quantize_rows
from titan_lowprec.shapes import Float, Float8e4m3fn, Int32, Tensor


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Operand:
    """Quantised packed tokens as the kernels read them; an unused field is an empty tensor."""

    codes_NHD: Tensor
    scale_NH: Tensor
    transposed_HDC: Tensor
    """The same codes, tokens innermost. Block ``b`` of the work list has columns ``32 b`` to
    ``32 b + 31``, so that documents start at multiples of 32; unused places of a block are zero,
    and every 16 tokens are in the order of ``permute_token_pairs``."""
    terms_HC2: Tensor
    """Of gradients, one column a token, in token order: the LSE (base 2) less the exponent of the
    gradient's scale (+inf in unused places), and ``sum_k codes_k * (out_k + low_k)``."""


def _empty_columns(x_NHD: Tensor, blocks: Tensor) -> Tensor:
    """Words of four codes, seen as codes ``(H, D, columns)``."""
    _, H, D = x_NHD.shape
    words = torch.empty(
        (H, D, blocks.shape[0] * BLOCK_TOKENS // 4), dtype=torch.int32, device=x_NHD.device
    )
    return words.view(torch.float8_e4m3fn)


def _pairs(x: Tensor) -> Tensor:
    """bf16 as 32-bit words of two, fp32 as it is."""
    return x.view(torch.int32) if x.dtype == torch.bfloat16 else x


def _grid_and_sizes(x_NHD: Tensor, blocks: Tensor) -> tuple[tuple[int], dict[str, int | bool]]:
    """Programs of one warp, the heads of a block side by side, as tokens lie in memory."""
    _, H, D = x_NHD.shape
    sizes = {"H": H, "D": D, "BLOCK_D": triton.next_power_of_2(D), "COMPILED": not interpreted()}
    return (blocks.shape[0] * H,), sizes | {"num_warps": 1}


def _launch_columns(
    x_NHD: Tensor, blocks: Tensor, operand: Operand, out: Tensor, low: Tensor, lse: Tensor,
    **choices: str,
) -> None:  # fmt: skip
    if x_NHD.shape[0] == 0:
        return
    grid, sizes = _grid_and_sizes(x_NHD, blocks)
    coded = choices["SOURCE"] == "codes"
    quantize_columns[grid](
        x_NHD.view(torch.int32) if coded else _pairs(x_NHD), _pairs(out), _pairs(low), lse,
        operand.codes_NHD.view(torch.int32), operand.scale_NH,
        operand.transposed_HDC.view(torch.int32), operand.terms_HC2,
        blocks, blocks.shape[0] * BLOCK_TOKENS, **sizes, **choices,
    )  # fmt: skip


def quantize_operand(
    x_NHD: Float[Tensor, "N H D"],
    blocks: Int32[Tensor, "items 4"],
    *,
    scales: BlockScales,
    rotate: bool,
    transpose: bool,
) -> Operand:
    """Rotate (or not) and quantise packed tokens in one pass over memory.

    Args:
        x_NHD: bf16 or fp32 values, contiguous.
        blocks: ``work_lists`` of ``(32, "document")``.
        scales: As in ``api.quantize_token_blocks``.
        rotate: Hadamard rotation over the head dimension first, in fp32.
        transpose: Write the transposed codes too (from the codes, if rotated).

    Numerics:
        Codes and bytes are those of ``hadamard`` followed by ``quantize_token_blocks``, bit for
        bit, NaN, infinity and tails included.

    Source:
        arXiv:2611.03344, section 3.1; 8-bit wgmma operands in shared memory are K-major only.
    """
    N, H, _ = x_NHD.shape
    device = x_NHD.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    operand = Operand(
        codes_NHD=torch.empty(x_NHD.shape, dtype=torch.float8_e4m3fn, device=device),
        scale_NH=torch.empty((N, H), dtype=torch.uint8, device=device),
        transposed_HDC=_empty_columns(x_NHD, blocks) if transpose and not rotate else none,
        terms_HC2=none,
    )
    if transpose and not rotate:
        _launch_columns(
            x_NHD, blocks, operand, x_NHD, x_NHD, x_NHD,
            SCALES=scales, SOURCE="values", REDUCE="nothing",
        )  # fmt: skip
    elif N:
        grid, sizes = _grid_and_sizes(x_NHD, blocks)
        quantize_rows[grid](
            _pairs(x_NHD), operand.codes_NHD.view(torch.int32), operand.scale_NH, none, none,
            blocks, ROTATE=rotate, SCALES=scales, NVFP4=False, **sizes,
        )  # fmt: skip
    if transpose and rotate:
        operand = replace(operand, transposed_HDC=transpose_codes(operand.codes_NHD, blocks))
    return operand


@dataclass(frozen=True, slots=True)
class MixedOperand:
    """One tensor as token-block codes, for products over tokens, and in NVFP4, for scores."""

    blocks: Operand
    four: Nvfp4Codes


def quantize_mixed_operand(
    x_NHD: Float[Tensor, "N H D"],
    blocks: Int32[Tensor, "items 4"],
    *,
    scales: BlockScales,
    rotate: bool,
) -> MixedOperand:
    """Rotate (or not) and quantise packed tokens twice in one pass over memory.

    Args:
        x_NHD: As in ``quantize_operand``; so the rest.
        blocks: ``work_lists`` of ``(32, "document")``.
        scales: Tokens that share an exponent of the token-block codes.
        rotate: Hadamard rotation over the head dimension first, in fp32.

    Numerics:
        Bit for bit ``hadamard``, then ``quantize_token_blocks`` and ``quantize_nvfp4`` without an
        outer scale; tokens past a row's last document count as zeros in both.

    Source:
        arXiv:2611.03344, section 3.4; NVFP4 as in cuBLAS, "1D Block Scaling".
    """
    N, H, _ = x_NHD.shape
    none = torch.empty(0, dtype=torch.int32, device=x_NHD.device)
    codes = torch.empty(x_NHD.shape, dtype=torch.float8_e4m3fn, device=x_NHD.device)
    scale = torch.empty((N, H), dtype=torch.uint8, device=x_NHD.device)
    four = empty_nvfp4(x_NHD)
    if N:
        grid, sizes = _grid_and_sizes(x_NHD, blocks)
        quantize_rows[grid](
            _pairs(x_NHD), codes.view(torch.int32), scale, four.packed_NHP.view(torch.int32),
            four.scale_NHG, blocks, ROTATE=rotate, SCALES=scales, NVFP4=True, **sizes,
        )  # fmt: skip
    return MixedOperand(Operand(codes, scale, none, none), four)


def transpose_codes(
    codes_NHD: Float8e4m3fn[Tensor, "N H D"], blocks: Int32[Tensor, "items 4"]
) -> Tensor:
    """Transposed codes of an operand that is already quantised; see ``Operand``.

    Numerics:
        Exact.

    Source:
        As ``quantize_operand``.
    """
    none = torch.empty(0, dtype=torch.int32, device=codes_NHD.device)
    operand = Operand(codes_NHD, none, _empty_columns(codes_NHD, blocks), none)
    _launch_columns(
        codes_NHD, blocks, operand, none, none, none,
        SCALES="token", SOURCE="codes", REDUCE="nothing",
    )  # fmt: skip
    return operand.transposed_HDC


def quantize_gradient(
    grad_NHD: Float[Tensor, "N H D"],
    out_NHD: Float[Tensor, "N H D"],
    low: Tensor,
    lse2_NH: Float[Tensor, "N H"],
    blocks: Int32[Tensor, "items 4"],
    *,
    scales: BlockScales | None,
) -> Operand:
    """Quantise the incoming gradient and reduce it with the output, from the same codes.

    Args:
        grad_NHD: Incoming gradient, contiguous.
        out_NHD: Output of the forward.
        low: Its residual ``(N, H, D)``, or an empty tensor.
        lse2_NH: The forward's LSE, base 2.
        blocks: As in ``quantize_operand``.
        scales: ``None`` keeps the gradient as it is (bf16 attention) and only reduces.

    Returns:
        All fields; under ``scales=None`` the gradient itself, no scales and nothing transposed.

    Numerics:
        Sums in fp32.

    Source:
        arXiv:2611.03344, section 3.3: D from the same gradient codes as dP.
    """
    N, H, _ = grad_NHD.shape
    device = grad_NHD.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    shape = (H, blocks.shape[0] * BLOCK_TOKENS, 2)
    terms = torch.empty(shape, dtype=torch.float32, device=device)
    operand = Operand(grad_NHD, none, none, terms)
    if scales is not None:
        operand = Operand(
            codes_NHD=torch.empty(grad_NHD.shape, dtype=torch.float8_e4m3fn, device=device),
            scale_NH=torch.empty((N, H), dtype=torch.uint8, device=device),
            transposed_HDC=_empty_columns(grad_NHD, blocks),
            terms_HC2=terms,
        )
    _launch_columns(
        grad_NHD, blocks, operand, out_NHD, low if low.numel() else out_NHD, lse2_NH,
        SCALES=scales or "token",
        SOURCE="bf16" if scales is None else "values",
        REDUCE="residual" if low.numel() else "output",
    )  # fmt: skip
    return operand
