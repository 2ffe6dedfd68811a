"""Compare the loss of two runs step by step, as a Markdown table and a plot.

    python tools/compare_runs.py outputs/llama1b_bf16 outputs/llama1b_mxfp8 --out llama1b

Refuses runs that did not see the same batches: a difference would mean nothing.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from titan_lowprec.titan.metrics_file import read_metrics
from titan_lowprec.titan.recipe_tool import exit_status

EVERY = 10


def training_steps(folder: Path) -> list[dict]:
    """The effective training records of a run's folder (or of a metrics file)."""
    file = folder if folder.is_file() else folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{folder}: must be a run's dump folder or its metrics.jsonl, is neither")
    return [record for record in read_metrics(file) if record["kind"] == "train"]


def common_steps(left: list[dict], right: list[dict]) -> list[tuple[dict, dict]]:
    """Pair the steps of two runs.

    Raises:
        ValueError: A step's batch differs between the runs.
    """
    pairs = list(zip(left, right, strict=False))
    for a, b in pairs:
        if a["fingerprint"] != b["fingerprint"]:
            raise ValueError(
                f"compare_runs: step {a['step']} must hold the same batch in both runs, got "
                f"fingerprints {a['fingerprint']} and {b['fingerprint']}; use one seed, data "
                "section and global batch size"
            )
    return pairs


def table(pairs: list[tuple[dict, dict]], names: tuple[str, str]) -> str:
    """Loss of both runs at some steps, and their difference averaged since the row before."""
    lines = [
        f"| step | tokens | loss {names[0]} | loss {names[1]} | mean difference of the steps |",
        "|---|---|---|---|---|",
    ]
    since: list[float] = []
    for a, b in pairs:
        since.append(b["loss"] - a["loss"])
        if a["step"] == 1 or a["step"] % EVERY == 0 or (a, b) == pairs[-1]:
            lines.append(
                f"| {a['step']} | {a['tokens_seen']:,} | {a['loss']:.4f} | {b['loss']:.4f} "
                f"| {sum(since) / len(since):+.4f} |"
            )
            since = []
    return "\n".join(lines)


def plot(pairs: list[tuple[dict, dict]], names: tuple[str, str], file: Path) -> None:
    """Both curves, and their difference below."""
    steps = [a["step"] for a, _ in pairs]
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), constrained_layout=True
    )
    for name, side in zip(names, (0, 1), strict=True):
        above.plot(steps, [pair[side]["loss"] for pair in pairs], label=name, linewidth=1.2)
    above.set_ylabel("training loss (nats per token)")
    above.legend()
    below.axhline(0, color="0.7", linewidth=0.8)
    below.plot(steps, [b["loss"] - a["loss"] for a, b in pairs], color="C3", linewidth=1.0)
    below.set_ylabel(f"{names[1]} - {names[0]}")
    below.set_xlabel("optimizer step")
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("baseline", type=Path, help="dump folder or metrics.jsonl")
    parser.add_argument("candidate", type=Path, help="dump folder or metrics.jsonl")
    parser.add_argument("--names", nargs=2, default=("bf16", "mxfp8"))
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.md and OUT.png")
    options = parser.parse_args()
    pairs = common_steps(training_steps(options.baseline), training_steps(options.candidate))
    names = (options.names[0], options.names[1])
    plot(pairs, names, options.out.with_suffix(".png"))
    options.out.with_suffix(".md").write_text(table(pairs, names) + "\n")
    print(table(pairs, names))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
