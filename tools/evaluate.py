"""Evaluate checkpoints: validation loss under several attentions, downstream tasks, export.

    python tools/evaluate.py loss outputs/llama_tiny_bf16 outputs/llama_tiny_mxfp8
    python tools/evaluate.py loss outputs/llama_tiny_bf16 --under native fp32 mxfp8 nvfp4_full
    python tools/evaluate.py tasks outputs/llama1b_bf16 outputs/llama1b_mxfp8 --under native fp32
    python tools/evaluate.py export outputs/llama1b_mxfp8 --to outputs/llama1b_mxfp8_hf

A run is a dump folder; its newest checkpoint is taken unless --step names one. The first run is
the baseline of the others, and its [data] and [validation] name the rows for all. "native" is the
attention that a run trained with, "fp32" the exact reference, "transformers" (tasks only) what
transformers computes on the exported checkpoint. Tasks need lm-eval: pip install
'titan_lowprec[eval]'; --out PATH writes PATH.md and PATH.json.
"""

import argparse
import sys
from pathlib import Path

import torch

from titan_lowprec import _autoload

_autoload.assume_cpu_without_accelerator()

from titan_lowprec.experiments.evaluation import loss_report, task_report, to_json  # noqa: E402
from titan_lowprec.titan.checkpoints import open_run  # noqa: E402
from titan_lowprec.titan.evaluate import NATIVE, evaluate  # noqa: E402
from titan_lowprec.titan.export import export_hugging_face  # noqa: E402
from titan_lowprec.titan.recipe_tool import exit_status  # noqa: E402
from titan_lowprec.titan.run_record import collect_versions  # noqa: E402
from titan_lowprec.titan.tasks import (  # noqa: E402
    PAPER_TASKS,
    TRANSFORMERS,
    TaskPlan,
    evaluate_tasks,
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    loss = commands.add_parser("loss", help="validation loss under several attentions")
    tasks = commands.add_parser("tasks", help="downstream tasks through lm-eval")
    export = commands.add_parser("export", help="write a Hugging Face folder")
    for command, several in ((loss, True), (tasks, True), (export, False)):
        command.add_argument("runs", type=Path, nargs="+" if several else 1, metavar="RUN")
        command.add_argument("--step", type=int, help="default: the newest checkpoint")
    for command, default in ((loss, (NATIVE, "fp32")), (tasks, (TRANSFORMERS,))):
        command.add_argument("--under", nargs="+", default=default, metavar="ATTENTION")
        command.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    loss.add_argument("--batches", type=int, default=-1, help="default: the whole set")
    tasks.add_argument("--tasks", nargs="+", default=PAPER_TASKS)
    tasks.add_argument("--task-folder", type=Path, help="folder with further task files")
    tasks.add_argument("--limit", type=int, help="documents of each task")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    return parser.parse_args()


def report(options: argparse.Namespace, device: torch.device) -> None:
    runs = [open_run(folder, step=options.step) for folder in options.runs]
    if options.command == "export":
        export_hugging_face(runs[0], options.to)
        print(f"step {runs[0].step} of {runs[0].folder}: {options.to}")
        return
    if options.command == "loss":
        settings = {"data": runs[0], "batches": options.batches, "device": device}
        results = [r for run in runs for r in evaluate(run, options.under, **settings)]
        text = loss_report(results)
    else:
        plan = TaskPlan(tuple(options.tasks), options.task_folder, options.limit)
        results = [
            r for run in runs for r in evaluate_tasks(run, options.under, plan=plan, device=device)
        ]
        text = task_report(results, note=f"lm-eval, commit {collect_versions()['commit']}.")
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_name(f"{options.out.name}.md").write_text(text)
        about = {"command": sys.argv, "versions": collect_versions()}
        options.out.with_name(f"{options.out.name}.json").write_text(to_json(results, about=about))


def main() -> int:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report(options, device)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
