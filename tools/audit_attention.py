"""Measurements of the FLAMIA paper beside those of the reference, as a table and a Markdown file.

    python tools/audit_attention.py --write titan_lowprec/ops/attention/AUDIT.md

Runs on a CPU in about five minutes (one head); `--device cuda --heads 16` uses a GPU. The paper's
values are those of arXiv:2611.03344 or of the notes that this project started from; a dash marks
what they do not give.
"""

import argparse
import dataclasses
import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from audit_attention_weights import Options, Row, late_keys, peaked_rows, row_gain

from titan_lowprec.diagnostics.causal_leak import attention_results
from titan_lowprec.ops.attention.api import AttentionSpec
from titan_lowprec.ops.attention.reference.casts import round_groups
from titan_lowprec.ops.attention.reference.forward import forward_reference
from titan_lowprec.ops.attention.reference.pairs import pair_inputs, pair_terms
from titan_lowprec.ops.attention.reference.tiles import plan_tiles
from titan_lowprec.testing.accuracy import attention_truth, cosine, relative_l2
from titan_lowprec.testing.cases import InputKind, packed_inputs

change = dataclasses.replace
MXFP8 = AttentionSpec.mxfp8(mask="causal")
MIXED = AttentionSpec.nvfp4_mixed(mask="causal")
FULL = AttentionSpec.nvfp4_full(mask="causal")
BLOCKS = change(MXFP8, fold="block_scaled", gradient_groups="tile")
STRICT = change(MXFP8, scales="token", dq_accum="fp16_boost")
PACKED_STRICT = "mxfp8, strict scales, documents of 13, 380 and 119 tokens"
LATE_CASES = (
    "65536 keys",
    "131072 keys",
    "65536 keys, rows of 0.82 times that",
    "131072 keys, rows of 0.82 times that",
)
GROUP_SIZES = ((1, 64), (32, 32), (64, 64), (128, 128), (1024, 1024))


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
        ("mxfp8, strict", STRICT, "-"),
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
        figures = tuple(cosine(*pair) for pair in pairs[:2])
        rows.append(Row(name, paper, f"{cosines}; rel-L2 O, dQ, dK, dV {errors}", figures))
    return rows


def rotation(options: Options) -> list[Row]:
    """Rotation with outliers in q and k: cosine of O without and with it."""
    kinds: tuple[tuple[InputKind, float, str], ...] = (
        ("gaussian", 1.0, "-"),
        ("hot_channel", 8.0, "-"),
        ("hot_channel", 30.0, "-"),
        ("outlier_entries", 10.0, "-"),
        ("outlier_entries", 30.0, "-"),
        ("outlier_entries", 100.0, "NVFP4 0.937 off, 0.857 on in an example of its own"),
    )
    rows = []
    for kind, strength, paper in kinds:
        inputs = packed_inputs(
            options.case(1024), kind=kind, strength=strength, seed=0, device=options.device
        )
        truth = attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask="causal").out_NHD
        cells, figures = [], []
        for spec in (MXFP8, MIXED):
            found = []
            for rotate in (False, True):
                rotated = change(spec, rotate=rotate)
                saved = forward_reference(*inputs.tensors()[:3], inputs.cu_seqlens_RM, rotated)
                found.append(cosine(saved.out_NHD, truth))
            figures += found
            cells.append(f"{spec.recipe} {found[0]:.4f} off, {found[1]:.4f} on")
        rows.append(Row(f"{kind}, {strength:g}", paper, "; ".join(cells), tuple(figures)))
    return rows


def perturbation(options: Options) -> list[Row]:
    """Table 5: one future token changed; relative change of all earlier rows of O and dQ."""
    at = 300
    alone = options.case(512)
    specs = (
        ("mxfp8, default scales", change(MXFP8, dq_accum="fp16_boost"), "-"),
        ("mxfp8, block scaled", change(BLOCKS, dq_accum="fp16_boost"), "-"),
        ("mxfp8, strict scales", STRICT, "0 / 0 (batched only)"),
        ("nvfp4_mixed, default scales", MIXED, "-"),
        (
            "nvfp4_mixed, strict scales",
            change(MIXED, scales="token", dq_accum="fp16_boost"),
            "0 / 0 (batched only)",
        ),
        ("nvfp4_full", FULL, "-"),
        (PACKED_STRICT, STRICT, "none: strict is batched only"),
    )
    rows = []
    for name, spec, paper in specs:
        packed = dataclasses.replace(alone, rows=((13, 380, 119),))
        case = packed if name == PACKED_STRICT else alone
        inputs = packed_inputs(case, kind="gaussian", strength=1.0, seed=0, device=options.device)
        before = attention_results(*inputs.tensors(), inputs.cu_seqlens_RM, spec=spec)
        cells, figures = [], []
        for size in (64.0, 1e6):
            q, k, v, grad = (x.clone() for x in inputs.tensors())
            for x in (q, k, v, grad):
                x[at] *= size
            after = attention_results(q, k, v, grad, inputs.cu_seqlens_RM, spec=spec)
            moved = [relative_l2(after[part][:at], before[part][:at]) for part in (0, 2)]
            figures += moved
            cells.append(f"x {size:g}: " + " / ".join(f"{m:.1e}" for m in moved))
        rows.append(Row(name, paper, "; ".join(cells), tuple(figures)))
    return rows


def granularity(options: Options) -> list[Row]:
    """Share of dS cast to zero against the size of the groups that share its exponent."""
    whole = change(AttentionSpec.bf16(mask="causal"), tile_q=1024, tile_k=1024)
    kinds: tuple[tuple[InputKind, float], ...] = (
        ("gaussian", 1.0),
        ("outlier_entries", 10.0),
        ("outlier_entries", 30.0),
        ("peaked", 0.85),
    )
    rows = []
    for kind, strength in kinds:
        inputs = packed_inputs(
            options.case(1024), kind=kind, strength=strength, seed=0, device=options.device
        )
        saved = forward_reference(*inputs.tensors()[:3], inputs.cu_seqlens_RM, whole)
        plan = plan_tiles(inputs.cu_seqlens_RM, total_tokens=1024, spec=whole)
        terms = pair_terms(
            pair_inputs(inputs.grad_out_NHD, saved, inputs.cu_seqlens_RM, plan, whole),
            plan,
            plan.diagonal_steps[0],
            whole,
        )
        sizes = GROUP_SIZES if kind == "gaussian" else (GROUP_SIZES[0], (32, 32), GROUP_SIZES[-1])
        for height, width in sizes:
            cast = round_groups(terms.U, rows=height, columns=width)
            lost = float(((cast == 0) & (terms.U != 0)).sum() / (terms.U != 0).sum())
            paper = "0.4 % to 29 % from finer to coarser" if height == 1024 else "-"
            ours = f"{lost:.2%}; rel-L2 {relative_l2(cast, terms.U):.4f}"
            rows.append(Row(f"{kind}, {strength:g}: {height} x {width}", paper, ours, (lost,)))
    return rows


SECTIONS = (fidelity, rotation, perturbation, granularity, row_gain, peaked_rows, late_keys)


def differences(found: dict[str, dict[str, Row]]) -> list[str]:
    """Give the rows of the closing table, from the figures of the sections above it."""
    full, mixed = (found["fidelity"][name].figures for name in ("nvfp4_full", "nvfp4_mixed"))
    sparse = found["rotation"]["outlier_entries, 100"].figures[2:]
    flushed = {name: row.figures[0] for name, row in found["granularity"].items()}
    gaussian, outliers = (
        f"{flushed[f'{kind}: 1 x 64']:.2%} to {flushed[f'{kind}: 1024 x 1024']:.2%}"
        for kind in ("gaussian, 1", "outlier_entries, 30")
    )
    late = [found["late_keys"][name].figures for name in LATE_CASES]
    packed = found["perturbation"][PACKED_STRICT].figures
    return [
        "| nvfp4_full, cosine of dQ | 0.9456 "
        f"| {full[1]:.4f} | {full[1] - 0.9456:+.4f} (O {full[0] - 0.9810:+.4f}) "
        "| The notes give no rule for the 4-bit scales of P, G and dS; ours puts a power of two on "
        "each line of a tile besides the E4M3 scales. Where every rule is given (nvfp4_mixed) we "
        f"differ by {mixed[0] - 0.9920:+.4f} / {mixed[1] - 0.9906:+.4f}. |",
        "| NVFP4 with outliers, cosine of O without and with rotation | 0.937, 0.857 "
        f"| {sparse[0]:.3f}, {sparse[1]:.3f} at 100 "
        f"| a loss of {sparse[0] - sparse[1]:.3f} against 0.080 "
        "| The inputs of the example are not given. The loss needs sparse entries and grows with "
        "them; a hot channel gains. V stays in 8 bits here. The strengths 30 and 100 were picked "
        "after trying several. |",
        "| dS cast to zero, finer to coarser groups | 0.4 % to 29 % "
        f"| Gaussian {gaussian}; outlier entries, 30: {outliers} | the range of the inputs "
        "| The paper counts during training, whose dS the notes do not describe; the share follows "
        "the inputs more than the groups. |",
        "| dV of late keys, fixed 2**8, 65536 and 131072 keys | 0.073 (14 %), 0.145 "
        f"| {late[0][0]:.3f} ({late[0][1]:.1%}), {late[1][0]:.3f} "
        f"| x {late[0][0] / 0.073:.2f}, x {late[1][0] / 0.145:.2f} "
        "| Our rows hold every key. Rows of 0.82 times the length give "
        f"{late[2][0]:.3f} ({late[2][1]:.1%}) and {late[3][0]:.3f}. That factor was "
        "fitted to the 14 % after four tries: fewer visible keys are one explanation, not shown. |",
        "| strict scales in packed calls: change of earlier rows of O, dQ | no such mode "
        f"| {max(packed[0::2]):g}, {max(packed[1::2]):g} | a mode more "
        "| Token exponents are applied outside the products, and the boost of dQ takes maxima over "
        "the keys up to a row of its own document. `tests/ops/attention/test_causality.py` holds "
        "the bits. |",
        gain_difference(found["peaked_rows"]),
    ]


def gain_difference(peaked: dict[str, Row]) -> str:
    """Give the closing row on peaked rows: FP8 beside the bf16 figures of the notes."""
    fp8, bf16 = (
        [row.figures for name, row in peaked.items() if name.startswith(recipe)]
        for recipe in ("mxfp8", "bf16")
    )

    def span(values: list[float], digits: int = 1) -> str:
        ends = (f"{min(values):.{digits}f}", f"{max(values):.{digits}f}")
        return " to ".join(dict.fromkeys(ends))

    def column(found: list[tuple[float, ...]], index: int) -> list[float]:
        return [figures[index] for figures in found]

    larger = [a[0] / b[0] for a, b in zip(fp8, bf16, strict=True)]
    calls = [figures[5] / figures[2] for figures in fp8]
    return (
        "| row gain of peaked rows over its floor, exact and lagging maximum | bf16: 1.05x, 6.4x "
        f"| bf16 {span(column(bf16, 1))}x, {span(column(bf16, 4))}x; "
        f"mxfp8 {span(column(fp8, 1))}x, {span(column(fp8, 4))}x "
        f"| exact: mxfp8 {span(larger, 0)} times bf16; lagging: see why "
        "| Measured against float64, not between two orders of keys, independent errors stay below "
        "1. P in E4M3 has four bits of mantissa less, and so 16 times the gain. (4, 4) lets a row "
        "lag by 4 instead of 8: a key that wins by more moves the reference, and from q = 0.6 k on "
        "own keys no longer lag; the rounded sum then only adds an error of its own. The "
        "operands' rounding hides the rest: the gain of a whole mxfp8 call with the lagging "
        f"maximum is {span(calls, 2)} times that with the exact one. |"
    )


def main() -> None:
    """Measure every section and print it, and write it where asked."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sections", nargs="+", choices=[f.__name__ for f in SECTIONS])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write is not None and arguments.sections:
        parser.error("--write needs every section: the closing one compares them")
    options = Options(arguments.length, arguments.heads, arguments.device)
    lines = [
        "# Attention: the paper's measurements and ours",
        "",
        f"`python tools/audit_attention.py --length {options.length} --heads {options.heads} "
        f"--device {options.device}`, torch {torch.__version__}, the reference implementation; "
        "head dimension 128, causal. Cosines and errors are against float64.",
    ]
    print("\n".join(lines), flush=True)
    found: dict[str, dict[str, Row]] = {}
    for section in SECTIONS:
        if arguments.sections and section.__name__ not in arguments.sections:
            continue
        assert section.__doc__ is not None
        title, _, body = inspect.cleandoc(section.__doc__).partition("\n\n")
        block = ["", f"## {title}", *(["", body] if body else []), ""]
        block += ["| case | paper | ours |", "|---|---|---|"]
        rows = section(options)
        found[section.__name__] = {row.what: row for row in rows}
        block += [f"| {row.what} | {row.paper} | {row.ours} |" for row in rows]
        print("\n".join(block), flush=True)
        lines += block
    if len(found) == len(SECTIONS):
        title = "Where we differ from the paper, by how much and why"
        block = ["", f"## {title}", "", "| what | paper or notes | ours | by how much | why |"]
        block += ["|---|---|---|---|---|", *differences(found)]
        print("\n".join(block), flush=True)
        lines += block
    if arguments.write is not None:
        arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
