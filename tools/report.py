"""Write the report of a sweep, finished or not, or compare any runs.

    python tools/report.py configs/attention_recipe_tiny.toml [--output outputs]
    python tools/report.py configs/attention_recipe_tiny.toml --to configs/attention_recipe_tiny
    python tools/report.py outputs/llama_tiny_bf16 outputs/llama_tiny_mxfp8 --to outputs/comparison

Both write Markdown, a PNG and one HTML file that opens without network. Runs are compared with the
first one: configuration, losses at equal tokens, step time, spikes, skipped steps, restarts.
"""

import argparse
import sys
from pathlib import Path

from titan_lowprec.experiments.comparison import read_runs, write_comparison
from titan_lowprec.experiments.matrix import read_matrix
from titan_lowprec.experiments.report import write_report
from titan_lowprec.experiments.results import load_histories, summarise
from titan_lowprec.experiments.run_state import load_runs
from titan_lowprec.titan.metrics_file import read_metrics


def write(options: argparse.Namespace) -> Path:
    """The page of a matrix, or of runs."""
    first = options.what[0]
    if first.suffix != ".toml":
        runs = read_runs(options.what, read_metrics)
        return write_comparison(runs, options.to or options.output / "comparison")
    if len(options.what) > 1:
        raise ValueError("report: one matrix is required, got several files; name one, or folders")
    matrix = read_matrix(first)
    folder = options.output / matrix.name
    results = summarise(matrix, load_histories(load_runs(folder), read_metrics))
    return write_report(results, folder, to=options.to)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", type=Path, nargs="+", metavar="MATRIX|FOLDER")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder of all sweeps")
    parser.add_argument(
        "--to", type=Path, help="path without ending; default: in the folder of sweeps"
    )
    options = parser.parse_args()
    try:
        page = write(options)
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(page.with_name(page.name.removesuffix("html") + "md").read_text())
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
