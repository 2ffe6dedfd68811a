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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import ConfigManager
from torchtitan.train import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from single_process import become_single_process
from step import CHECKPOINTING, FP8, ROOT

from titan_lowprec.data.bundled import resolve_path
from titan_lowprec.titan.run_record import collect_versions
from titan_lowprec.titan.trainer import make_trainer

WARM_STEPS = 3
BLOCK_STEPS = 6
ROUNDS = 4
FLAVOR = "stock1p35B"
FP8_ALL = (*FP8[:1], "--quantize.linear.float8.recipe_name=rowwise", *FP8[2:])
"""The gradient of the weight in FP8 too."""
ROWS = {"2k": (8, 2048), "64k": (1, 65536)}
"""Rows of a step and their tokens; the documents of "64k" are as long as its rows."""


@dataclass(frozen=True)
class Contender:
    """One trainer: TorchTitan's own (``recipe`` None) or that of a recipe of ours."""

    rows: str
    recipe: str | None
    checkpointing: str = "none"
    graph: bool = False
    options: tuple[str, ...] = ()

    def arguments(self, text: Path, folder: str) -> list[str]:
        """Of the command line."""
        batch, tokens = ROWS[self.rows]
        shared = [
            f"--job.dump_folder={folder}",
            f"--model.flavor={FLAVOR}",
            f"--training.seq_len={tokens}",
            f"--training.local_batch_size={batch}",
            f"--training.global_batch_size={batch}",
            f"--training.steps={WARM_STEPS + BLOCK_STEPS * ROUNDS}",
            "--lr_scheduler.warmup_steps=20",
            *CHECKPOINTING[self.checkpointing],
            *self.options,
        ]
        if self.recipe is None:
            return [
                "--model.name=llama3",
                f"--model.hf_assets_path={resolve_path('bundled:tokenizer')}",
                "--training.dataset=bundled",
                f"--training.dataset_path={text}",
                "--compile.enable",
                "--optimizer.lr=3e-4",
                *([] if self.checkpointing != "none" else ["--activation_checkpoint.mode=none"]),
                *shared,
            ]
        return [
            f"--job.config_file={ROOT}/recipes/llama1b_{self.recipe}.toml",
            "--data.source=local",
            "--data.no-streaming",
            f"--data.paths={text}",
            f"--data.cache_dir={folder}/cache",
            "--lr_scheduler.total_steps=1000",
            "--checkpoint.no-enable",
            f"--graph.{'' if self.graph else 'no-'}enable",
            *shared,
        ]


CONTENDERS = {
    "2k-stock": Contender("2k", None),
    "2k-bf16": Contender("2k", "bf16", graph=True),
    "2k-mxfp8": Contender("2k", "mxfp8", graph=True),
    "2k-mxfp8-eager": Contender("2k", "mxfp8"),
    "2k-mxfp8-fp8linear": Contender("2k", "mxfp8", graph=True, options=FP8),
    "2k-mxfp8-fp8linear-all": Contender("2k", "mxfp8", graph=True, options=FP8_ALL),
    "64k-stock": Contender("64k", None, "full"),
    "64k-bf16": Contender("64k", "bf16", "full"),
    "64k-mxfp8": Contender("64k", "mxfp8", "full"),
}


def write_text(path: Path, rows: str) -> Path:
    """The bundled text as JSON lines; for long rows, all of it as one document."""
    lines = Path(resolve_path("bundled:train")).read_text().splitlines()
    if rows == "64k":
        whole = "\n\n".join(json.loads(line)["text"] for line in lines)
        lines = [json.dumps({"id": "all", "text": whole})]
    path.write_text("\n".join(lines) + "\n")
    return path


def load_stock_text(path: str) -> Any:
    """What stock TorchTitan's loader reads."""
    from datasets import Dataset

    return Dataset.from_list([json.loads(line) for line in Path(path).read_text().splitlines()])


def teach_stock() -> None:
    """Give TorchTitan's own llama3 the model and the text, through its public tables."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    llama3_args[FLAVOR] = TransformerModelArgs(
        dim=2048, n_layers=16, n_heads=16, vocab_size=128256, multiple_of=256,
        rope_theta=500000, attn_type="flex", attn_mask_type="block_causal",
    )  # fmt: skip
    DATASETS["bundled"] = DatasetConfig(
        path="", loader=load_stock_text, sample_processor=lambda sample: sample["text"]
    )


class Turns:
    """Wraps ``train_step``: waits for its turn before each block and reports each block's time."""

    def __init__(self, trainer: Any, pipe: Connection) -> None:
        self.trainer, self.pipe = trainer, pipe
        self.train_step = trainer.train_step
        self.begun = 0.0
        trainer.train_step = self

    def __call__(self, iterator: Any) -> None:
        step = self.trainer.step - WARM_STEPS - 1
        if step >= 0 and step % BLOCK_STEPS == 0:
            self.wait()
        self.train_step(iterator)
        if step >= 0 and step % BLOCK_STEPS == BLOCK_STEPS - 1:
            torch.cuda.synchronize()
            self.pipe.send((time.perf_counter() - self.begun) / BLOCK_STEPS)

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
        Turns(trainer, pipe)
        trainer.train()
        pipe.send(torch.cuda.max_memory_reserved() / 2**30)
        trainer.close()


class Runner:
    """The parent's end of a process."""

    def __init__(self, name: str, text: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=train, args=(name, str(text), theirs), daemon=True)
        self.process.start()
        theirs.close()

    def block(self) -> float:
        """Seconds a step of one block."""
        self.pipe.send("go")
        return float(self.pipe.recv())


def run_group(names: list[str], text: Path, *, apart: bool) -> dict[str, Any]:
    """Times of each round and memory, by name; a case that dies is left out with its reason."""
    results: dict[str, Any] = {
        name: {"blocks_s": [], "memory_reserved_gib": None} for name in names
    }

    def rounds(runners: list[Runner]) -> None:
        for number in range(ROUNDS):
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
        "steps": BLOCK_STEPS * len(mine["blocks_s"]),
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
        results = run_group(options.group, text, apart=options.apart)
    stock = next((n for n in options.group if CONTENDERS[n].recipe is None), None)
    baseline = results[stock]["blocks_s"] if stock else []
    with Path(options.output).open("a") as file:
        for name in options.group:
            line = record(name, results, [] if name == stock else baseline, shared)
            print(line, flush=True)
            file.write(line + "\n")


if __name__ == "__main__":
    main()
