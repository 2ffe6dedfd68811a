"""Sections of `audit_attention.py` on the cast of softmax weights: row gains and late keys."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_lowprec.ops.attention.api import AttentionSpec
from titan_lowprec.ops.attention.reference.casts import round_e4m3fn, round_groups
from titan_lowprec.ops.attention.reference.forward import forward_reference
from titan_lowprec.ops.attention.reference.operands import product_operands
from titan_lowprec.testing.accuracy import attention_truth, relative_l2, row_gain_error
from titan_lowprec.testing.cases import PEAKS, PackedCase, PackedInputs, packed_inputs

change = dataclasses.replace
BF16 = AttentionSpec.bf16(mask="causal")
BLOCKS = change(AttentionSpec.mxfp8(mask="causal"), fold="block_scaled", gradient_groups="tile")
LAGGING = change(BLOCKS, weight_exponent=4, max_lag=4)
MAXIMA = {
    "exact maximum, (8, 0)": BLOCKS,
    "lagging, (4, 4)": LAGGING,
    "lagging, (4, 4), rounded row sum": change(LAGGING, row_sum="rounded"),
}
NOTES_FP8 = {0.35: "exact 2.1e-3, lagging 5.6e-3, with rounded sum 5.4e-3"}
NOTES_BF16 = {0.25: "exact 1.4e-4 (1.05x), lagging 1.2e-3 (6.4x); sparse MLA, also qv = 0.25 v"}


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    what: str
    paper: str
    ours: str
    figures: tuple[float, ...] = ()
    """Numbers in ``ours`` that the closing section quotes."""


@dataclass(frozen=True)
class Options:
    """Size of the measurement."""

    length: int
    heads: int
    device: str

    def case(self, length: int) -> PackedCase:
        """One causal document."""
        return PackedCase(rows=((length,),), heads=self.heads, kv_heads=self.heads, head_dim=128)


def row_gain(options: Options) -> list[Row]:
    """Coherent gain of rows with one dominant key, first or last, from the cast of P alone.

    q, k and v are exact in e4m3 (entries 0, 1 and -1), so that nothing else is rounded.
    """
    generator = torch.Generator().manual_seed(0)
    rows = []
    for place, index in (("first", 0), ("last", -1)):
        gains: dict[str, list[Tensor]] = {name: [] for name in MAXIMA}
        for common in range(50, 90, 2):
            signs = [
                torch.randint(0, 2, (256, 1, 128), generator=generator) * 2.0 - 1 for _ in range(3)
            ]
            q, k, v = signs
            q[..., :common] = 1
            k[index] = 0
            k[index, :, :common] = 1
            cu = torch.tensor([[0, 256]], dtype=torch.int32)
            truth = attention_truth(q, k, v, v, cu, mask="full").out_NHD
            for name, spec in MAXIMA.items():
                full = change(spec, mask="full", rotate=False)
                gains[name].append(
                    row_gain_error(forward_reference(q, k, v, cu, full).out_NHD, truth)
                )
        for name, found in gains.items():
            rows.append(Row(f"dominant key {place}, {name}", "-", f"{rms(torch.cat(found)):.2e}"))
    return rows


@dataclass(frozen=True)
class Gain:
    """Row gain of one call on peaked rows."""

    weights: float
    """RMS of the gain from the cast of P alone: against float64 of the operands as rounded."""
    ratio: float
    """That, over the gain of errors that are independent between elements."""
    call: float
    """RMS of the gain of the whole call, output rounded, against float64 of the inputs."""

    def __str__(self) -> str:
        return f"{self.weights:.1e} ({self.ratio:.1f}x; call {self.call:.1e})"


def rms(x: Tensor) -> float:
    """Root of the mean square."""
    return float(x.double().square().mean().sqrt())


def peaked_gains(
    inputs: PackedInputs, specs: tuple[AttentionSpec, ...], exact: Tensor
) -> list[Gain]:
    """Run forwards whose output stays fp32, so that its rounding does not hide that of P.

    The specifications must round their operands alike: they share one truth.
    """
    q, k, v, grad_out = (x.float() for x in inputs.tensors())
    cu = inputs.cu_seqlens_RM
    rounded = exact
    found = []
    for spec in specs:
        saved = forward_reference(q, k, v, cu, spec)
        if spec.quantised and rounded is exact:
            q_deq, k_deq, v_deq = (x.decoded() for x in product_operands(saved, spec))
            rounded = attention_truth(q_deq, k_deq, v_deq, grad_out, cu, mask="causal").out_NHD
        error = (saved.out_NHD.double() - rounded).norm(dim=-1) / rounded.norm(dim=-1)
        gain = rms(row_gain_error(saved.out_NHD, rounded))
        floor = rms(error) * math.sqrt(3 / q.shape[-1])
        call = rms(row_gain_error(saved.out_NHD.to(inputs.q_NHD.dtype), exact))
        found.append(Gain(weights=gain, ratio=gain / floor, call=call))
    return found


def peaked_rows(options: Options) -> list[Row]:
    """Peaked rows, q = beta k, own key last: row gain rms from the cast of P (over its floor).

    The floor is the notes': the error's RMS over elements times sqrt(3 / d), what independent
    roundings of P give. ``call`` includes the rounding of operands and output.
    """
    rows = []
    bf16_maxima = (BF16, change(BF16, max_lag=8), change(BF16, max_lag=8, row_sum="rounded"))
    for beta in PEAKS:
        inputs = packed_inputs(
            options.case(options.length),
            kind="peaked",
            strength=beta,
            seed=0,
            device=options.device,
        )
        truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask="causal")
        score = (inputs.q_NHD.double() * inputs.k_NJD.double()).sum(-1) * 128**-0.5
        median = float((score - truth.lse_NH).exp().median())
        for name, lag, specs, notes in (
            ("mxfp8", "(4, 4)", tuple(MAXIMA.values()), NOTES_FP8),
            ("bf16", "(0, 8)", bf16_maxima, NOTES_BF16),
        ):
            found = peaked_gains(inputs, specs, truth.out_NHD)
            exact, lagging, summed = found
            ours = f"exact {exact}; lagging {lag} {lagging}; with rounded sum {summed}"
            figures = tuple(x for gain in found for x in (gain.weights, gain.ratio, gain.call))
            case = f"{name}, q = {beta} k (own key: median weight {median:.3f})"
            rows.append(Row(case, notes.get(beta, "-"), ours, figures))
    return rows


def late_keys(options: Options) -> list[Row]:
    """dV of the last keys of a long document, from the cast of P alone: rel-L2, share lost.

    Scores are N(0, 1), so that P is about 1 / n; 2048 queries and 2048 keys at the end are drawn.
    """
    cases = (
        ("8192 keys", 8192, "0.027 fixed"),
        ("65536 keys", 65536, "0.073 fixed (14 % flushed), 0.026 dynamic"),
        ("131072 keys", 131072, "0.145 fixed"),
        ("65536 keys, rows of 0.82 times that", 0.82 * 65536, "as above"),
        ("131072 keys, rows of 0.82 times that", 0.82 * 131072, "as above"),
    )
    generator = torch.Generator().manual_seed(0)
    rows = []
    for what, length, paper in cases:
        scores = torch.randn(2048, 2048, generator=generator)
        P = torch.exp(scores) / (length * math.exp(0.5))
        G = torch.randn(2048, 128, generator=generator).double()
        exact = P.T.double() @ G
        casts: dict[str, Callable[[], Tensor]] = {
            "fixed": lambda P=P: round_e4m3fn(P * 2.0**8) * 2.0**-8,
            "32 x 32": lambda P=P: round_groups(P, rows=32, columns=32),
            "line of 64": lambda P=P: round_groups(P, rows=64, columns=1),
        }
        cells = []
        figures: tuple[float, ...] = ()
        for name, cast in casts.items():
            weights = cast()
            error = relative_l2(weights.T.double() @ G, exact)
            lost = float((weights == 0).float().mean())
            figures += (error, lost)
            cells.append(f"{name} {error:.3f} ({lost:.1%})")
        rows.append(Row(what, paper, ", ".join(cells), figures))
    return rows
