"""Measurements of the FLAMIA paper beside those of the reference, as a table and a Markdown file.

    python tools/audit_attention.py --write titan_lowprec/ops/attention/AUDIT.md

Runs on a CPU in a few minutes (one head); `--device cuda --heads 16` uses a GPU. The paper's
values are those of arXiv:2611.03344 or of the notes that this project started from; a dash marks
what they do not give.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from titan_lowprec.diagnostics.causal_leak import attention_results
from titan_lowprec.ops.attention.api import AttentionSpec
from titan_lowprec.ops.attention.reference.casts import round_e4m3fn, round_groups
from titan_lowprec.ops.attention.reference.forward import forward_reference
from titan_lowprec.ops.attention.reference.pairs import pair_inputs, pair_terms
from titan_lowprec.ops.attention.reference.tiles import plan_tiles
from titan_lowprec.testing.accuracy import attention_truth, cosine, relative_l2, row_gain_error
from titan_lowprec.testing.cases import InputKind, PackedCase, packed_inputs

change = dataclasses.replace
MXFP8 = AttentionSpec.mxfp8(mask="causal")
MIXED = AttentionSpec.nvfp4_mixed(mask="causal")
FULL = AttentionSpec.nvfp4_full(mask="causal")
BLOCKS = change(MXFP8, fold="block_scaled", gradient_groups="tile")


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True)
class Options:
    """Size of the measurement."""

    length: int
    heads: int
    device: str

    def case(self, length: int) -> PackedCase:
        """One causal document."""
        return PackedCase(rows=((length,),), heads=self.heads, kv_heads=self.heads, head_dim=128)


def fidelity(options: Options) -> list[Row]:
    """Table 4: cosines of O and dQ on Gaussian inputs."""
    inputs = packed_inputs(
        options.case(options.length), kind="gaussian", strength=1.0, seed=0, device=options.device
    )
    truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask="causal")
    rows = []
    specs = (
        ("mxfp8, hopper fold", MXFP8, "0.9988 / 0.9979"),
        (
            "mxfp8, block scaled, (4, 4), fixed dV exponent (the paper's choices)",
            change(BLOCKS, weight_exponent=4, max_lag=4, dv_exponent="fixed"),
            "0.9988 / 0.9979",
        ),
        ("mxfp8, strict", change(MXFP8, scales="token", dq_accum="fp16_boost"), "-"),
        ("nvfp4_mixed", MIXED, "0.9920 / 0.9906"),
        ("nvfp4_full", FULL, "0.9810 / 0.9456"),
        ("bf16", AttentionSpec.bf16(mask="causal"), "-"),
    )
    for name, spec, paper in specs:
        results = attention_results(*inputs.tensors(), inputs.cu_seqlens_RM, spec=spec)
        out, _, dq, dk, dv = results
        pairs = ((out, truth.out_NHD), (dq, truth.dq_NHD), (dk, truth.dk_NJD), (dv, truth.dv_NJD))
        errors = ", ".join(f"{relative_l2(a, b):.4f}" for a, b in pairs)
        cosines = f"{cosine(*pairs[0]):.4f} / {cosine(*pairs[1]):.4f}"
        rows.append(Row(name, paper, f"{cosines}; rel-L2 O, dQ, dK, dV {errors}"))
    return rows


def rotation(options: Options) -> list[Row]:
    """Rotation with outliers in q and k: cosine of O without and with it."""
    kinds: tuple[tuple[InputKind, float, str], ...] = (
        ("gaussian", 1.0, "-"),
        ("hot_channel", 8.0, "-"),
        ("hot_channel", 30.0, "-"),
        ("outlier_entries", 10.0, "-"),
        ("outlier_entries", 30.0, "NVFP4 0.937 off, 0.857 on in an example of its own"),
    )
    rows = []
    for kind, strength, paper in kinds:
        inputs = packed_inputs(
            options.case(1024), kind=kind, strength=strength, seed=0, device=options.device
        )
        truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask="causal").out_NHD
        cells = []
        for spec in (MXFP8, MIXED):
            found = []
            for rotate in (False, True):
                rotated = change(spec, rotate=rotate)
                saved = forward_reference(*inputs.tensors()[:3], inputs.cu_seqlens_RM, rotated)
                found.append(cosine(saved.out_NHD, truth))
            cells.append(f"{spec.recipe} {found[0]:.4f} off, {found[1]:.4f} on")
        rows.append(Row(f"{kind}, {strength:g}", paper, "; ".join(cells)))
    return rows


def perturbation(options: Options) -> list[Row]:
    """Table 5: one future token changed; relative change of all earlier rows of O and dQ."""
    length, at = 512, 300
    inputs = packed_inputs(
        options.case(length), kind="gaussian", strength=1.0, seed=0, device=options.device
    )
    rows = []
    specs = (
        ("mxfp8, default scales", change(MXFP8, dq_accum="fp16_boost")),
        ("mxfp8, block scaled", change(BLOCKS, dq_accum="fp16_boost")),
        ("mxfp8, strict scales", change(MXFP8, scales="token", dq_accum="fp16_boost")),
        ("nvfp4_mixed, default scales", MIXED),
        ("nvfp4_mixed, strict scales", change(MIXED, scales="token", dq_accum="fp16_boost")),
        ("nvfp4_full", FULL),
    )
    for name, spec in specs:
        before = attention_results(*inputs.tensors(), inputs.cu_seqlens_RM, spec=spec)
        cells = []
        for size in (64.0, 1e6):
            changed = [x.clone() for x in inputs.tensors()]
            for x in changed:
                x[at] *= size
            after = attention_results(*changed, inputs.cu_seqlens_RM, spec=spec)
            moved = (relative_l2(after[part][:at], before[part][:at]) for part in (0, 2))
            cells.append(f"x {size:g}: " + " / ".join(f"{m:.1e}" for m in moved))
        paper = "0 / 0 (batched only)" if "strict" in name else "-"
        rows.append(Row(name, paper, "; ".join(cells)))
    return rows


def granularity(options: Options) -> list[Row]:
    """Share of dS cast to zero against the size of the groups that share its exponent."""
    inputs = packed_inputs(
        options.case(1024), kind="gaussian", strength=1.0, seed=0, device=options.device
    )
    whole = change(AttentionSpec.bf16(mask="causal"), tile_q=1024, tile_k=1024)
    saved = forward_reference(*inputs.tensors()[:3], inputs.cu_seqlens_RM, whole)
    plan = plan_tiles(inputs.cu_seqlens_RM, total_tokens=1024, spec=whole)
    terms = pair_terms(
        pair_inputs(inputs.grad_out_NHD, saved, inputs.cu_seqlens_RM, plan, whole),
        plan,
        plan.diagonal_steps[0],
        whole,
    )
    rows = []
    for height, width in ((1, 64), (32, 32), (64, 64), (128, 128), (1024, 1024)):
        cast = round_groups(terms.U, rows=height, columns=width)
        lost = ((cast == 0) & (terms.U != 0)).sum() / (terms.U != 0).sum()
        error = relative_l2(cast, terms.U)
        paper = "0.4 % to 29 % from finer to coarser" if height == 1024 else "-"
        rows.append(Row(f"{height} x {width}", paper, f"{float(lost):.2%}; rel-L2 {error:.4f}"))
    return rows


def row_gain(options: Options) -> list[Row]:
    """Coherent gain of rows with one dominant key, first or last, from the cast of P alone.

    q, k and v are exact in e4m3 (entries 0, 1 and -1), so that nothing else is rounded.
    """
    generator = torch.Generator().manual_seed(0)
    specs = {
        "exact maximum, (8, 0)": BLOCKS,
        "lagging, (4, 4)": change(BLOCKS, weight_exponent=4, max_lag=4),
        "lagging, (4, 4), rounded row sum": change(
            BLOCKS, weight_exponent=4, max_lag=4, row_sum="rounded"
        ),
    }
    rows = []
    for place, index in (("first", 0), ("last", -1)):
        gains: dict[str, list[Tensor]] = {name: [] for name in specs}
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
            for name, spec in specs.items():
                full = change(spec, mask="full", rotate=False)
                gains[name].append(
                    row_gain_error(forward_reference(q, k, v, cu, full).out_NHD, truth)
                )
        for name, found in gains.items():
            rms = float(torch.cat(found).square().mean().sqrt())
            rows.append(Row(f"dominant key {place}, {name}", "-", f"{rms:.2e}"))
    return rows


def late_keys(options: Options) -> list[Row]:
    """dV of the last keys of a long document, from the cast of P alone: rel-L2, share lost.

    Scores are N(0, 1), so that P is about 1 / n; 2048 queries and 2048 keys at the end are drawn.
    """
    papers = {
        8192: "0.027 fixed",
        65536: "0.073 fixed (14 % flushed), 0.026 dynamic",
        131072: "0.145 fixed",
    }
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length, paper in papers.items():
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
        for name, cast in casts.items():
            weights = cast()
            error = relative_l2(weights.T.double() @ G, exact)
            cells.append(f"{name} {error:.3f} ({float((weights == 0).float().mean()):.1%})")
        rows.append(Row(f"{length} keys", paper, ", ".join(cells)))
    return rows


SECTIONS = (fidelity, rotation, perturbation, granularity, row_gain, late_keys)


def main() -> None:
    """Measure every section and print it, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sections", nargs="+", choices=[f.__name__ for f in SECTIONS])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    options = Options(arguments.length, arguments.heads, arguments.device)
    lines = [
        "# Attention: the paper's measurements and ours",
        "",
        f"`python tools/audit_attention.py --length {options.length} --heads {options.heads} "
        f"--device {options.device}`, torch {torch.__version__}, the reference implementation; "
        "head dimension 128, causal. Cosines and errors are against float64.",
    ]
    print("\n".join(lines), flush=True)
    for section in SECTIONS:
        if arguments.sections and section.__name__ not in arguments.sections:
            continue
        assert section.__doc__ is not None
        block = ["", f"## {section.__doc__.splitlines()[0]}", "", "| case | paper | ours |"]
        block.append("|---|---|---|")
        block += [f"| {row.what} | {row.paper} | {row.ours} |" for row in section(options)]
        print("\n".join(block), flush=True)
        lines += block
    if arguments.write is not None:
        arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
