"""Create the loss dashboard in wandb, or print what would be created.

    python tools/dashboard.py --dry-run
    python tools/dashboard.py --project titan_lowprec --entity TEAM
    python tools/dashboard.py --differences configs/attention_recipe_tiny.toml [--mode offline]

The dry run needs neither network nor wandb-workspaces. The last mirrors the difference of each run
to its baseline, computed from metrics.jsonl, as runs of their own.
The same panels without wandb: python tools/report.py MATRIX.
"""

import argparse
import json
import sys
from pathlib import Path

from titan_lowprec.experiments.dashboard import log_differences, save_workspace, specification
from titan_lowprec.experiments.matrix import read_matrix
from titan_lowprec.experiments.results import load_histories, summarise
from titan_lowprec.experiments.run_state import load_runs
from titan_lowprec.titan.metrics_file import read_metrics
from titan_lowprec.titan.recipe_tool import exit_status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--project", default="titan_lowprec")
    parser.add_argument("--entity", default="", help="user or team")
    parser.add_argument("--name", default="Low-precision training: loss")
    parser.add_argument("--dry-run", action="store_true", help="print the specification")
    parser.add_argument("--differences", type=Path, metavar="MATRIX", help="mirror differences")
    parser.add_argument("--mode", choices=("online", "offline"), default="online")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder of all sweeps")
    options = parser.parse_args()
    specified = specification(entity=options.entity, project=options.project, name=options.name)
    if options.dry_run:
        print(json.dumps(specified, indent=1))
        return 0
    if options.differences:
        matrix = read_matrix(options.differences)
        runs = load_runs(options.output / matrix.name)
        results = summarise(matrix, load_histories(runs, read_metrics))
        where = {"entity": options.entity, "project": options.project}
        print(f"{log_differences(results, mode=options.mode, **where)} runs of differences")
    else:
        print(save_workspace(specified))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
