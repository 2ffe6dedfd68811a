"""Time whole training steps of the 1B recipes: graph off and on, checkpointing, FP8 linears.

    python tools/bench/step.py --output step_h200.jsonl [--cases 2k-mxfp8-none ...]

Every case is a real trainer in a process of its own. Where a case has a graph, blocks of replayed
and of eager steps alternate on the same model, so both saw the same machine. Step time is the
device's, between the ends of two steps' work (the trainer's own ``step_time_s``); a case's figure
is the median over its steps, the first of a block left out. ``--layers 1`` compiles what the cases
need without timing the whole model; ``--table FILE`` prints the records as Markdown.
"""

import argparse
import dataclasses
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from single_process import become_single_process

from titan_lowprec import _autoload

_autoload.assume_cpu_without_accelerator()

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

import titan_lowprec.titan.register  # noqa: E402, F401
from titan_lowprec.titan import trainer as trainer_module  # noqa: E402
from titan_lowprec.titan.llama3.args import FLAVORS  # noqa: E402
from titan_lowprec.titan.metrics_file import read_metrics  # noqa: E402
from titan_lowprec.titan.run_record import collect_versions  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WARM_STEPS = 2
BLOCK_STEPS = 4


def fp8_linears(recipe: str) -> tuple[str, ...]:
    """Options of torchao's recipes, the head left out: it is part of the chunked loss."""
    return (
        "--model.converters=quantize.linear.float8",
        f"--quantize.linear.float8.recipe_name={recipe}",
        "--quantize.linear.float8.filter_fqns=output",
    )


FP8 = fp8_linears("rowwise_with_gw_hp")
TENSORWISE = fp8_linears("tensorwise")
CHECKPOINTING = {
    "none": (),
    "op": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
    "linears": (  # all results of attention and products are kept, the rest is computed again
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
        "--activation_checkpoint.save_ops=attention,linears,amax",
    ),
    "budget70": (
        "--activation_checkpoint.mode=memory_budget",
        "--activation_checkpoint.memory_budget=0.7",
    ),
    "full": ("--activation_checkpoint.mode=full",),
}
ROWS = {"2k": (8, 2048, 128), "16k": (1, 16384, 512), "64k": (1, 65536, 1024)}
"""Rows of a step, their tokens, documents they may hold."""


@dataclass(frozen=True)
class Case:
    """One trainer."""

    rows: str
    recipe: str
    checkpointing: str
    options: tuple[str, ...] = ()
    graph: bool = True
    """Alternate blocks of replayed and eager steps, otherwise eager steps only."""

    def arguments(self) -> list[str]:
        """Of the recipe's command line."""
        batch, tokens, documents = ROWS[self.rows]
        steps = WARM_STEPS + BLOCK_STEPS * (4 if self.graph else 1)
        return [
            f"--job.config_file={ROOT}/recipes/llama1b_{self.recipe}.toml",
            "--data.source=local",
            "--data.no-streaming",
            "--data.paths=bundled:train",
            f"--data.max_documents={documents}",
            f"--training.seq_len={tokens}",
            f"--training.local_batch_size={batch}",
            f"--training.global_batch_size={batch}",
            f"--training.steps={steps}",
            "--lr_scheduler.warmup_steps=20",
            "--lr_scheduler.total_steps=1000",
            "--checkpoint.no-enable",
            f"--graph.{'' if self.graph else 'no-'}enable",
            *CHECKPOINTING[self.checkpointing],
            *self.options,
        ]


STOCK = "--model.flavor=stock1p35B"
CASES = {
    "2k-mxfp8-none": Case("2k", "mxfp8", "none"),
    "2k-bf16-none": Case("2k", "bf16", "none"),
    "2k-mxfp8-fp8linear-none": Case("2k", "mxfp8", "none", FP8),
    "2k-mxfp8-fp8tensorwise-none": Case("2k", "mxfp8", "none", TENSORWISE),
    "2k-mxfp8-linears": Case("2k", "mxfp8", "linears"),
    "2k-mxfp8-budget70": Case("2k", "mxfp8", "budget70"),
    "2k-mxfp8-op": Case("2k", "mxfp8", "op"),
    "2k-mxfp8-full": Case("2k", "mxfp8", "full"),
    "2k-mxfp8-none-nocompile": Case("2k", "mxfp8", "none", ("--compile.no-enable",)),
    "stock1p35B-2k-bf16-none": Case("2k", "bf16", "none", (STOCK,)),
    "stock1p35B-2k-mxfp8-none": Case("2k", "mxfp8", "none", (STOCK,)),
    "stock1p35B-2k-mxfp8-fp8linear-none": Case("2k", "mxfp8", "none", (STOCK, *FP8)),
    "stock1p35B-2k-mxfp8-fp8tensorwise-none": Case("2k", "mxfp8", "none", (STOCK, *TENSORWISE)),
    "16k-mxfp8-none": Case("16k", "mxfp8", "none"),
    "16k-mxfp8-op": Case("16k", "mxfp8", "op"),
    "16k-mxfp8-full": Case("16k", "mxfp8", "full"),
    "64k-mxfp8-op": Case("64k", "mxfp8", "op", graph=False),
    "64k-bf16-op": Case("64k", "bf16", "op", graph=False),
    "64k-mxfp8-full": Case("64k", "mxfp8", "full", graph=False),
    "64k-mxfp8-none": Case("64k", "mxfp8", "none", graph=False),
}


@contextmanager
def running(arguments: list[str]) -> Iterator[Any]:
    """A trainer of one process, closed at the end."""
    become_single_process()
    trainer: Any = None
    torch._inductor.config.emulate_precision_casts = False  # row-wise FP8 sets it for good
    try:
        config = ConfigManager().parse_args(arguments)
        trainer = trainer_module.make_trainer(Trainer)(config)
        yield trainer
    finally:
        if trainer is not None:
            trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        del trainer
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_eager(step: int, case: Case) -> bool:
    """Which blocks of a case with a graph run eagerly: every second after the warm-up."""
    if not case.graph or step <= WARM_STEPS:
        return True
    return (step - WARM_STEPS - 1) // BLOCK_STEPS % 2 == 1


def measure(case: Case, *, cache: Path, layers: int | None) -> list[dict[str, Any]]:
    """Run a case; a record for its eager and one for its replayed steps."""
    arguments = case.arguments()
    if layers is not None:
        for name, args in FLAVORS.items():
            FLAVORS[name] = dataclasses.replace(args, n_layers=layers)
    with tempfile.TemporaryDirectory() as folder:
        arguments += [f"--job.dump_folder={folder}", f"--data.cache_dir={cache}"]
        with running(arguments) as trainer:
            trainer_module.hooks_are_due = lambda trainer: is_eager(trainer.step, case)
            if layers is not None:
                trainer.job_config.training.steps = WARM_STEPS
            trainer.train()
        lines = read_metrics(Path(folder) / "metrics.jsonl", kind="train")
    return [] if layers is not None else [*summaries(lines, case)]


def summaries(lines: list[dict[str, Any]], case: Case) -> Iterator[dict[str, Any]]:
    """Medians of the eager and of the replayed steps.

    Memory of the eager steps is that of the steps before the capture, memory of the replayed ones
    that of the first block after it: later blocks hold both.
    """
    timed = [r for r in lines if r["step"] > WARM_STEPS]
    for graph in (False, True) if case.graph else (False,):
        chosen = [
            r
            for r in timed
            if is_eager(r["step"], case) is not graph
            and (r["step"] - WARM_STEPS - 1) % BLOCK_STEPS > 0
        ]
        times = sorted(r["step_time_s"] for r in chosen)
        median_s = statistics.median(times)
        last = WARM_STEPS + BLOCK_STEPS if graph or not case.graph else WARM_STEPS
        batch, tokens, _ = ROWS[case.rows]
        yield {
            "graph": graph,
            "steps": len(chosen),
            "step_ms": round(1e3 * median_s, 2),
            "step_ms_range": [round(1e3 * times[0], 2), round(1e3 * times[-1], 2)],
            "tokens_per_s": round(batch * tokens / median_s),
            "mfu": statistics.median(r["mfu"] or 0 for r in chosen),
            "memory_reserved_gib": round(max(r["memory_gib"] for r in lines[:last]), 2),
            "data_wait_share": sum(r["data_wait_s"] for r in chosen) / sum(times),
            "documents_per_row": statistics.mean(r["documents_per_row"] for r in chosen),
        }


def in_own_process(case: Case, cache: Path, layers: int | None) -> list[dict[str, Any]]:
    """``measure`` where no earlier case has left memory reserved."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, case, cache=cache, layers=layers).result()


def run_all(names: list[str], options: argparse.Namespace) -> None:
    """Measure cases in order until time is up; records are appended as they come."""
    begun = time.monotonic()
    device = torch.cuda.get_device_name()
    versions = collect_versions() | {"commit": options.commit or collect_versions()["commit"]}
    for name in names:
        if time.monotonic() - begun > options.deadline_s:
            print(f"{name}: left out, {options.deadline_s} s are over", flush=True)
            continue
        try:
            records = in_own_process(CASES[name], Path(options.cache), options.layers)
        except torch.OutOfMemoryError:
            records = [{"graph": CASES[name].graph, "error": "out of memory"}]
        for record in records:
            line = {
                "op": "step",
                "case": name,
                "device": device,
                "layers": options.layers,
                **record,
                "versions": versions,
            }
            print(json.dumps({k: v for k, v in line.items() if k != "versions"}), flush=True)
            with Path(options.output).open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(f"{name}: {time.monotonic() - begun:.0f} s since the start", flush=True)


def table(path: str) -> str:
    """Records as a Markdown table."""
    rows = ["| case | graph | step | tokens/s | MFU | reserved | data wait |", "|" + "---|" * 7]
    for text in Path(path).read_text().splitlines():
        r = json.loads(text)
        graph = "on" if r["graph"] else "off"
        if "error" in r:
            rows.append(f"| {r['case']} | {graph} | {r['error']} | | | | |")
            continue
        low, high = r["step_ms_range"]
        rows.append(
            f"| {r['case']} | {graph} | {r['step_ms']:.1f} ms ({low:.1f}-{high:.1f}) | "
            f"{r['tokens_per_s']:,} | {100 * r['mfu']:.1f} % | {r['memory_reserved_gib']:.1f} GiB "
            f"| {100 * r['data_wait_share']:.2f} % |"
        )
    return "\n".join(rows)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", default="step.jsonl")
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "step_bench_cache"))
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--deadline_s", type=float, default=1e9)
    parser.add_argument("--commit", default="")
    parser.add_argument("--table", default="")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return
    if not torch.cuda.is_available():
        sys.exit("step.py: a CUDA device is required, got none; the recipes' speed is a GPU's")
    run_all(options.cases, options)


if __name__ == "__main__":
    main()
