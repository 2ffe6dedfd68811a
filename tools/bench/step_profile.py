"""Where the time of a training step goes, by kind of kernel.

    torchrun --nproc_per_node=N tools/bench/step_profile.py --output profile.jsonl \
        --job.config_file recipes/llama1b_mxfp8.toml [--section.key value ...]

Runs the recipe's trainer, records three eager steps with PyTorch's profiler (a replayed CUDA graph
does not tell which op a kernel is of) and adds up the device's time: attention, head and loss,
optimizer, linear layers, the rest (norms, rotary embedding, elementwise, copies), communication
that nothing else covers, and gaps. A kernel belongs to the op that launched it.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from single_process import become_single_process

GROUPS: tuple[str, ...] = (
    "attention",
    "head + loss",
    "optimizer",
    "linears",
    "norm + elementwise",
    "exposed communication",
    "gaps",
)
WARM_STEPS = 3
TIMED_STEPS = 3
_ATTENTION = ("titan_lowprec::attention", "titan_lowprec::quantize", "flex_attention", "flash_attn")
_HEAD = ("cross_entropy", "log_softmax", "nll_loss")
_OPTIMIZER = ("Optimizer.step", "_fused_adam", "clip_grad", "_foreach_norm")
_GEMM = ("gemm", "nvjet", "cutlass", "xmma", "_scaled_mm", "cublas")


def group_of(kernel: str, ops: list[str]) -> str:
    """The group of a kernel launched inside ``ops`` (outermost first)."""
    if "nccl" in kernel.lower():
        return "exposed communication"
    for group, marks in (("attention", _ATTENTION), ("head + loss", _HEAD)):
        if any(mark in name for mark in marks for name in (*ops, kernel)):
            return group
    if any(mark in name for mark in _OPTIMIZER for name in ops):
        return "optimizer"
    if any(mark in kernel.lower() for mark in _GEMM):
        return "linears"
    return "norm + elementwise"


class Launches:
    """Which ops were open on a thread when a kernel was launched."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._ops: dict[int, list[str]] = {}
        threads: dict[Any, list[tuple[float, int, dict[str, Any]]]] = defaultdict(list)
        for event in events:
            category = event.get("cat")
            if category in ("cpu_op", "user_annotation"):
                threads[event["tid"]].append((event["ts"], 0, event))
            elif category in ("cuda_runtime", "cuda_driver") and "correlation" in event.get(
                "args", {}
            ):
                threads[event["tid"]].append((event["ts"], 1, event))
        for entries in threads.values():
            self._walk(sorted(entries, key=lambda entry: entry[:2]))

    def _walk(self, entries: list[tuple[float, int, dict[str, Any]]]) -> None:
        """Keep the open ops of a thread while time passes."""
        opened: list[dict[str, Any]] = []
        for when, launch, event in entries:
            opened = [op for op in opened if op["ts"] + op["dur"] > when]
            if launch:
                self._ops[event["args"]["correlation"]] = [op["name"] for op in opened]
            else:
                opened.append(event)

    def ops_of(self, kernel: dict[str, Any]) -> list[str]:
        """Names of the ops around the launch, outermost first."""
        return self._ops.get(kernel.get("args", {}).get("correlation", -1), [])


def time_by_group(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of the device by group, of a trace's ``traceEvents``.

    Where kernels overlap, the time counts once, for the one that is first in ``GROUPS``;
    communication is the last of them, so what is left of it is exposed. Gaps are times between the
    first and the last kernel in which none ran.
    """
    launches = Launches(events)
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [event for event in events if event.get("cat") in kinds]
    if not kernels:
        raise ValueError("step_profile: a trace with device kernels is required, got none")
    edges: list[tuple[float, int, int]] = []
    for kernel in kernels:
        index = GROUPS.index(group_of(kernel["name"], launches.ops_of(kernel)))
        edges.append((kernel["ts"], 1, index))
        edges.append((kernel["ts"] + kernel["dur"], -1, index))
    edges.sort()
    total = dict.fromkeys(GROUPS, 0.0)
    running = [0] * len(GROUPS)
    before = edges[0][0]
    for when, change, index in edges:
        first = next((i for i, count in enumerate(running) if count), len(GROUPS) - 1)
        total[GROUPS[first]] += when - before
        running[index] += change
        before = when
    return total


def table(path: str) -> str:
    """Records as a Markdown table, one column a run."""
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    records = [r for r in records if r.get("op") == "step_profile"]
    rows = [
        "| | " + " | ".join(r["case"] for r in records) + " |",
        "|---" * (len(records) + 1) + "|",
    ]
    for group in GROUPS:
        cells = [
            f"{r['ms'][group]:.1f} ms ({100 * r['ms'][group] / r['step_ms']:.1f} %)"
            for r in records
        ]
        rows.append(f"| {group} | " + " | ".join(cells) + " |")
    rows.append("| step | " + " | ".join(f"{r['step_ms']:.1f} ms" for r in records) + " |")
    return "\n".join(rows)


def run(arguments: list[str], case: str, output: Path, *, keep: str) -> None:
    """Train, record, write a line (rank 0)."""
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    from titan_lowprec.titan.run_record import collect_versions
    from titan_lowprec.titan.trainer import make_trainer

    if not torch.cuda.is_available():
        sys.exit("step_profile.py: a CUDA device is required, got none")
    if "RANK" not in os.environ:
        become_single_process()
    steps = WARM_STEPS + TIMED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*arguments, f"--job.dump_folder={folder}", f"--training.steps={steps}"]
        arguments += ["--checkpoint.no-enable", "--graph.no-enable"]
        trainer: Any = make_trainer(Trainer)(ConfigManager().parse_args(arguments))
        train_step = trainer.train_step
        profiler = torch.profiler.profile()

        def profiled(iterator: Any) -> None:
            if trainer.step == WARM_STEPS + 1:
                torch.cuda.synchronize()
                profiler.start()
            train_step(iterator)
            if trainer.step == steps:
                torch.cuda.synchronize()
                profiler.stop()

        trainer.train_step = profiled
        trainer.train()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if keep:
            Path(keep).write_text(trace.read_text())
        trainer.close()
    if rank == 0:
        ms = {group: us / 1e3 / TIMED_STEPS for group, us in time_by_group(events).items()}
        line = {
            "op": "step_profile",
            "case": case,
            "gpus": world_size,
            "device": torch.cuda.get_device_name(),
            "ms": {group: round(value, 3) for group, value in ms.items()},
            "step_ms": round(sum(ms.values()), 3),
            "versions": collect_versions(),
        }
        with output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps({k: v for k, v in line.items() if k != "versions"}), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Parse the command line; what it does not know is the trainer's."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", default="profile.jsonl")
    parser.add_argument("--case", default="step")
    parser.add_argument("--table", default="")
    parser.add_argument("--keep_trace", default="", help="write the Chrome trace here too")
    options, arguments = parser.parse_known_args()
    if options.table:
        print(table(options.table))
        return
    run(arguments, options.case, Path(options.output), keep=options.keep_trace)


if __name__ == "__main__":
    main()
