"""Probe attention for causal leaks: `python tools/leak_probe.py --recipe mxfp8 --scales token`.

Changes every token from several positions on by values of size 1e6 (and 2**-15 and 2, which find
less) and compares the bits of earlier rows of O, LSE and dQ. Exit status 1 if strict scales leak.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from titan_lowprec.diagnostics.causal_leak import LARGE_CHANGE, LeakReport, probe_prefix
from titan_lowprec.ops.attention.api import AttentionSpec, resolve_impl
from titan_lowprec.testing.cases import PackedCase, packed_inputs

SIZES = (LARGE_CHANGE, 2.0, 2.0**-15)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--recipe", default="mxfp8", choices=["bf16", "mxfp8", "nvfp4_mixed", "nvfp4_full"]
    )
    parser.add_argument("--scales", default="token_block", choices=["token_block", "token"])
    parser.add_argument("--dq-accum", default="fp32", choices=["fp32", "fp16_boost"])
    parser.add_argument("--impl", default="auto", choices=["auto", "reference", "triton"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--documents", type=int, nargs="+", default=[13, 120, 59])
    parser.add_argument("--head-dim", type=int, default=64)
    return parser.parse_args()


def specification(options: argparse.Namespace) -> AttentionSpec:
    """The causal specification that the command line asks for."""
    spec: AttentionSpec = getattr(AttentionSpec, options.recipe)(mask="causal")
    if not spec.quantised:
        return dataclasses.replace(spec, dq_accum=options.dq_accum)
    return dataclasses.replace(spec, scales=options.scales, dq_accum=options.dq_accum)


def print_report(size: float, report: LeakReport) -> None:
    """Print one line of the table."""
    cells = [f"{report.change_at:9d}", f"{size:9.2g}"]
    for name, rows in report.rows.items():
        span = f"{rows[0]}-{rows[-1]}" if rows else "none"
        cells.append(f"{span:>9} {report.largest_relative[name]:8.1e}")
    print(" | ".join(cells), "| noise" if report.noise else "")


def main() -> int:
    """Run the probe."""
    options = parse_arguments()
    spec, device = specification(options), torch.device(options.device)
    impl = resolve_impl(options.impl, device=device, spec=spec, head_dim=options.head_dim)
    case = PackedCase(
        rows=(tuple(options.documents),), heads=4, kv_heads=2, head_dim=options.head_dim
    )
    inputs = packed_inputs(case, kind="gaussian", strength=1.0, seed=0, device=device)
    print(f"{case.id}, {impl} on {device}: {spec.encode()}")
    print("change at |      size | rows of O, rel. change | LSE                | dQ")
    leaked = False
    start = options.documents[0] if len(options.documents) > 1 else 0
    for change_at in (start + 1, start + 16, start + 31, start + 32, start + 37, start + 70):
        if change_at >= case.total_tokens:
            continue
        for size in SIZES:
            report = probe_prefix(
                *inputs.tensors(),
                inputs.cu_seqlens_RM,
                change_at=change_at,
                size=size,
                seed=1,
                spec=spec,
                impl=impl,
            )
            print_report(size, report)
            leaked |= not report.clean
    strict = spec.scales == "token"
    if not leaked:
        print("clean")
    elif strict:
        print("LEAK, although scales='token' is strict")
    else:
        print("leaks inside a block are expected with scales='token_block'; 'token' is strict")
    return int(strict and leaked)


if __name__ == "__main__":
    sys.exit(main())
