"""The health of one attention call: what its codes lose, what its output loses, what leaks."""

from dataclasses import dataclass, replace
from statistics import median

import torch

from titan_lowprec.diagnostics.attention_stats import gradient_statistics
from titan_lowprec.diagnostics.causal_leak import LARGE_CHANGE, LeakReport, probe_prefix
from titan_lowprec.formats.catalogue import E4M3FN, UE8M0
from titan_lowprec.formats.codec import decode_e4m3fn
from titan_lowprec.formats.token_blocks import BLOCK_TOKENS, row_metadata
from titan_lowprec.ops.attention.api import Impl, attention_packed
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.hadamard.api import hadamard
from titan_lowprec.ops.quantize.api import quantize_token_blocks
from titan_lowprec.shapes import Float, Int32, Tensor

CODED = ("mxfp8", "nvfp4_mixed")
"""Recipes whose Q, K and V have e4m3 token-block codes."""


@dataclass(frozen=True, slots=True)
class CodeHealth:
    """E4M3 codes of one operand."""

    at_maximum: float
    """Share of elements whose code is the largest one. Round-up scales clip nothing beyond it."""
    flushed: float
    """Share of elements that are not zero and whose code is."""
    exponent_median: float
    """Median over blocks of the scales' base-2 exponents."""
    exponent_range: float
    """Largest minus smallest exponent of blocks that are not zero."""


@dataclass(frozen=True, slots=True)
class LeakHealth:
    """The causal probe: all tokens from the middle of a block on are redrawn at 1e6."""

    leaking_rows: int
    """Earlier rows of O, LSE and dQ whose bits moved."""
    rows_outside_block: int
    """Those before the 32-token block of the change, where every recipe must keep its bits."""
    relative_change: float
    """Largest change of such a row of O, relative to its norm. (A row of dQ can be close to zero,
    that of a document's first token for example, so that any change of it is large.)"""
    natural_change: float
    """The same for tokens redrawn at the operands' own root mean square: what such a leak amounts
    to among texts, where the other figures say whether there is one."""
    noise: bool
    """Whether two equal calls differed: then the other figures prove nothing."""


@dataclass(frozen=True, slots=True)
class AttentionHealth:
    """Figures of one layer."""

    output_error: float
    """Relative L2 distance of O from the exact (fp32) reference of the same operands."""
    codes: dict[str, CodeHealth]
    """Of q, k and v; empty for recipes without e4m3 token blocks."""
    ds_flushed: float | None
    """Share of dS cast to zero for dQ under a gradient from N(0, 1); ``None`` without codes."""
    ds_row_sum: float | None
    """Sums of the rows of dS, 0 in exact arithmetic, over the sums of their magnitudes (root mean
    squares over rows), under the same gradient and before its cast."""
    leak: LeakHealth | None
    """``None`` if no document has two tokens."""


def attention_health(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    cu_seqlens_M1: Int32[Tensor, " M1"],
    *,
    spec: AttentionSpec,
    impl: Impl,
) -> AttentionHealth:
    """Measure one row's operands; draws from generators of its own alone.

    Args:
        q_NHD: Queries of one packed row.
        k_NJD: Keys.
        v_NJD: Values.
        cu_seqlens_M1: Document offsets of the row.
        spec: What the layer computes.
        impl: With what.
    """
    q, k, v = (x.detach() for x in (q_NHD, k_NJD, v_NJD))
    cu_RM = cu_seqlens_M1.unsqueeze(0)
    generator = torch.Generator().manual_seed(0)
    grad_out = torch.randn(q.shape, generator=generator).to(q)
    out = attention_packed(q, k, v, cu_RM, spec=spec, impl=impl).out_NHD
    exact_spec = replace(AttentionSpec.fp32(mask=spec.mask), tile_q=spec.tile_q, tile_k=spec.tile_k)
    exact = attention_packed(
        q.float(), k.float(), v.float(), cu_RM, spec=exact_spec, impl="reference"
    )
    statistics = None
    if spec.quantised:
        statistics = gradient_statistics(q, k, v, grad_out, cu_RM, spec=spec)
    return AttentionHealth(
        output_error=relative_error(out, exact.out_NHD),
        codes=code_health(q, k, v, cu_RM, spec) if spec.recipe in CODED else {},
        ds_flushed=statistics and statistics.ds_flushed_dq,
        ds_row_sum=statistics and statistics.row_sum_residual,
        leak=leak_health((q, k, v, grad_out), cu_seqlens_M1, spec=spec, impl=impl),
    )


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Relative L2 distance in double precision; 0 if both are zero."""
    difference = (actual.double() - exact.double()).norm()
    return float(difference / exact.double().norm()) if difference != 0 else 0.0


def code_health(
    q: Tensor, k: Tensor, v: Tensor, cu_RM: Tensor, spec: AttentionSpec
) -> dict[str, CodeHealth]:
    """The codes of Q, K and V as the layer stores them."""
    block_N = row_metadata(cu_RM, row_tokens=len(q)).block_index_N
    rotated = (hadamard(x) if spec.rotate else x for x in (q, k))
    return {
        name: operand_health(x[block_N >= 0], block_N[block_N >= 0], spec)
        for name, x in zip("qkv", (*rotated, v), strict=True)
    }


def operand_health(x_NHD: Tensor, block_N: Tensor, spec: AttentionSpec) -> CodeHealth:
    """Quantise one operand and count."""
    coded = quantize_token_blocks(x_NHD, block_N, scales=spec.scales)
    magnitude = decode_e4m3fn(coded.codes_NHD).abs()
    exponents = (coded.scale_NH.int() - UE8M0.bias)[coded.scale_NH != 0].tolist()
    count = max(x_NHD.numel(), 1)
    return CodeHealth(
        at_maximum=int((magnitude == E4M3FN.max_value).sum()) / count,
        flushed=int(((magnitude == 0) & (x_NHD != 0)).sum()) / count,
        exponent_median=float(median(exponents)) if exponents else 0.0,
        exponent_range=float(max(exponents) - min(exponents)) if exponents else 0.0,
    )


def leak_health(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    cu_seqlens_M1: Tensor,
    *,
    spec: AttentionSpec,
    impl: Impl,
) -> LeakHealth | None:
    """Probe the longest document with a change in the middle of a block, half-way through it."""
    lengths = cu_seqlens_M1.diff()
    document = int(lengths.argmax())
    start, length = int(cu_seqlens_M1[document]), int(lengths[document])
    if length < 2:
        return None
    block = length // 2 // BLOCK_TOKENS * BLOCK_TOKENS
    change = min(block + BLOCK_TOKENS // 2, length - 1)
    own_size = float(torch.cat([x.float().flatten() for x in inputs[:3]]).square().mean().sqrt())

    def probe(size: float) -> LeakReport:
        with torch.enable_grad():
            return probe_prefix(
                *inputs,
                cu_seqlens_M1.unsqueeze(0),
                change_at=start + change,
                size=size,
                seed=0,
                spec=spec,
                impl=impl,
            )

    report = probe(LARGE_CHANGE)
    rows = [row for moved in report.rows.values() for row in moved]
    return LeakHealth(
        leaking_rows=len(rows),
        rows_outside_block=sum(row < start + block for row in rows),
        relative_change=report.largest_relative["O"],
        natural_change=probe(own_size).largest_relative["O"],
        noise=report.noise,
    )
