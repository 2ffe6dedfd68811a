"""Write the report of a sweep, finished or not: Markdown, PNG and one HTML file.

python tools/report.py configs/attention_recipe_tiny.toml [--output outputs]
python tools/report.py configs/attention_recipe_tiny.toml --to configs/attention_recipe_tiny
"""

import argparse
import sys
from pathlib import Path

from titan_lowprec.experiments.matrix import read_matrix
from titan_lowprec.experiments.report import write_report
from titan_lowprec.experiments.results import load_histories, summarise
from titan_lowprec.experiments.run_state import load_runs
from titan_lowprec.titan.metrics_file import read_metrics


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("matrix", type=Path)
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder of all sweeps")
    parser.add_argument(
        "--to", type=Path, help="path without ending, default: in the sweep's folder"
    )
    options = parser.parse_args()
    try:
        matrix = read_matrix(options.matrix)
        folder = options.output / matrix.name
        runs = load_runs(folder)
        results = summarise(matrix, load_histories(runs, read_metrics))
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    page = write_report(results, folder, to=options.to)
    print(page.with_name(page.name.removesuffix("html") + "md").read_text())
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
