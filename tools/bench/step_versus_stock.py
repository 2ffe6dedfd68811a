"""Time training steps beside stock TorchTitan 0.2.2, block by block on one GPU.

    python tools/bench/step_versus_stock.py --output step_h200.jsonl [--group 2k-stock 2k-mxfp8 ...]

Every case of a group is a process with its own trainer: TorchTitan's ``Trainer``, llama3 with
FlexAttention and loader, or ours. All stay on the GPU and blocks of steps take turns. A block is
timed by the wall between two device synchronisations, with loader, optimizer and host. A ratio
compares blocks of one round. ``--apart``: one process after the other, where only one trainer fits.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import ConfigManager
from torchtitan.train import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from contenders import CONTENDERS, FLAVOR, PLANS, ROWS, Plan, teach_stock, write_text
from single_process import become_single_process

from titan_lowprec.titan.run_record import collect_versions
from titan_lowprec.titan.trainer import make_trainer


class Turns:
    """Wraps ``train_step``: waits for its turn before each block and reports each block's time."""

    def __init__(self, trainer: Any, pipe: Connection, plan: Plan) -> None:
        self.trainer, self.pipe, self.plan = trainer, pipe, plan
        self.train_step = trainer.train_step
        self.begun = 0.0
        trainer.train_step = self

    def __call__(self, iterator: Any) -> None:
        step, size = self.trainer.step - self.plan.warm - 1, self.plan.block
        if step >= 0 and step % size == 0:
            self.wait()
        self.train_step(iterator)
        if step >= 0 and step % size == size - 1:
            torch.cuda.synchronize()
            self.pipe.send((time.perf_counter() - self.begun) / size)

    def wait(self) -> None:
        torch.cuda.synchronize()
        self.pipe.send("ready")
        self.pipe.recv()
        self.begun = time.perf_counter()


def train(name: str, text: str, pipe: Connection) -> None:
    """One process: build the trainer, train in turns, then send its memory."""
    contender = CONTENDERS[name]
    become_single_process()
    with tempfile.TemporaryDirectory() as folder:
        if contender.recipe is None:
            teach_stock()
        config = ConfigManager().parse_args(contender.arguments(Path(text), folder))
        trainer: Any = (Trainer if contender.recipe is None else make_trainer(Trainer))(config)
        Turns(trainer, pipe, PLANS[contender.rows])
        trainer.train()
        pipe.send(torch.cuda.max_memory_reserved() / 2**30)
        trainer.close()


class Runner:
    """The parent's end of a process."""

    def __init__(self, name: str, text: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=train, args=(name, str(text), theirs))
        self.process.start()
        theirs.close()

    def block(self) -> float:
        """Seconds a step of one block."""
        self.pipe.send("go")
        return float(self.pipe.recv())


def end_all() -> None:
    """End what still runs: processes that may have children of their own are no daemons."""
    for process in multiprocessing.active_children():
        process.terminate()


def run_group(names: list[str], text: Path, *, apart: bool) -> dict[str, Any]:
    """Times of each round and memory, by name; a case that dies is left out with its reason."""
    results: dict[str, Any] = {
        name: {"blocks_s": [], "memory_reserved_gib": None} for name in names
    }

    def rounds(runners: list[Runner]) -> None:
        for number in range(PLANS[CONTENDERS[names[0]].rows].rounds):
            for runner in runners:
                if number:
                    runner.pipe.recv()  # ready
                results[runner.name]["blocks_s"].append(runner.block())
        for runner in runners:
            results[runner.name]["memory_reserved_gib"] = runner.pipe.recv()
            runner.process.join()

    waiting = []
    for name in names:
        print(f"{name}: starting", flush=True)
        runner = Runner(name, text)
        try:
            runner.pipe.recv()  # ready, alone on the GPU so far: autotuning was undisturbed
            if apart:
                rounds([runner])
            else:
                waiting.append(runner)
        except EOFError:
            runner.process.join()
            results[name]["error"] = f"ended with status {runner.process.exitcode}"
    rounds(waiting)
    return results


def record(
    name: str, results: dict[str, Any], baseline: list[float], shared: dict[str, Any]
) -> str:
    """A JSON line."""
    contender, mine = CONTENDERS[name], results[name]
    batch, tokens = ROWS[contender.rows]
    line: dict[str, Any] = {
        "op": "step",
        "case": name,
        "model": FLAVOR,
        "graph": contender.graph,
        "activation_checkpoint": contender.checkpointing,
    }
    if "error" in mine:
        return json.dumps(line | {"error": mine["error"]} | shared)
    median_s = statistics.median(mine["blocks_s"])
    line |= {
        "steps": PLANS[contender.rows].block * len(mine["blocks_s"]),
        "step_ms": round(1e3 * median_s, 2),
        "step_ms_blocks": [round(1e3 * t, 2) for t in mine["blocks_s"]],
        "tokens_per_s": round(batch * tokens / median_s),
        "memory_reserved_gib": round(mine["memory_reserved_gib"], 2),
    }
    if baseline:
        ratios = [b / m for b, m in zip(baseline, mine["blocks_s"], strict=True)]
        line["speed_over_stock"] = round(statistics.median(ratios), 4)
        line["speed_over_stock_range"] = [round(min(ratios), 4), round(max(ratios), 4)]
    return json.dumps(line | shared)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument(
        "--group",
        nargs="+",
        choices=list(CONTENDERS),
        default=["2k-stock", "2k-bf16", "2k-mxfp8"],
        help="cases of equal rows; the stock one among them is what ratios refer to",
    )
    parser.add_argument("--apart", action="store_true", help="one process at a time")
    parser.add_argument("--output", default="step.jsonl")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("step_versus_stock.py: a CUDA device is required, got none")
    rows = {CONTENDERS[name].rows for name in options.group}
    if len(rows) != 1:
        parser.error(f"--group: cases of equal rows are required, got {sorted(rows)}")
    versions = collect_versions()
    versions["commit"] = options.commit or versions["commit"]
    shared = {
        "run": uuid.uuid4().hex[:8],
        "interleaved": not options.apart,
        "device": torch.cuda.get_device_name(),
        "versions": versions,
    }
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder) / "text.jsonl", rows.pop())
        try:
            results = run_group(options.group, text, apart=options.apart)
        finally:
            end_all()
    stock = next((n for n in options.group if CONTENDERS[n].recipe is None), None)
    baseline = results[stock]["blocks_s"] if stock else []
    with Path(options.output).open("a") as file:
        for name in options.group:
            line = record(name, results, [] if name == stock else baseline, shared)
            print(line, flush=True)
            file.write(line + "\n")


if __name__ == "__main__":
    main()
