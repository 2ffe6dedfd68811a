"""Time each kernel of our attention alone, by PyTorch's profiler.

    python tools/bench/attention_kernels.py --output FILE [--cases 16x4096-H16-J4 ...]

A line a part: the median, least and most of its microseconds over the repeats of one forward and
one backward. Host, launches and gaps are not in it, nor are other implementations: totals beside
them are `run.py --op attention`. Two trees are compared by running this in turns, with each one on
PYTHONPATH; the sums of magnitudes in every line show whether their results are the same.
"""

import argparse
import json
import statistics
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from attention import HEAD_DIM, HEADS, SPECS, make_inputs
from attention import LAYOUTS as TIMED_LAYOUTS
from bench_registry import Case
from run import current_commit, environment

LAYOUTS = TIMED_LAYOUTS | {"1024x64": (64,) * 1024}
"""With one of single tiles, where all is beginning and end."""
WARM, REPEATS = 3, 8
KERNELS = {
    "attention_forward": "forward",
    "attention_backward_keys": "keys",
    "attention_backward_queries": "queries",
    "quantize_": "quantise",
    "_scale_columns": "quantise",
    "_widen": "quantise",
    "_work_lists": "lists",
}
"""The beginning of a kernel's name and the part that its time belongs to."""


def part_of(kernel: str) -> str | None:
    """Part of a kernel, None if it is none of ours."""
    return next((part for name, part in KERNELS.items() if kernel.startswith(name)), None)


def times_by_part(launches: Iterable[tuple[str, float]], repeats: int) -> dict[str, list[float]]:
    """Microseconds of every part in each repeat, from names and times of launches in order.

    Raises:
        ValueError: A part has launches that ``repeats`` does not divide.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for kernel, time_us in launches:
        part = part_of(kernel)
        if part is not None:
            times[part].append(time_us)
    for part, all_us in times.items():
        if len(all_us) % repeats:
            raise ValueError(
                f"attention_kernels: launches of {part} in {repeats} equal repeats are required, "
                f"got {len(all_us)}"
            )
        size = len(all_us) // repeats
        times[part] = [sum(all_us[i : i + size]) for i in range(0, len(all_us), size)]
    return dict(times)


def parse_case(name: str) -> Case:
    """The case of a name like ``16x4096-H16-J4``, with any number of heads."""
    try:
        layout, heads, kv_heads = name.rsplit("-", 2)
        H, J = int(heads.removeprefix("H")), int(kv_heads.removeprefix("J"))
        if H % J == 0:
            return Case(name, {"lengths": LAYOUTS[layout], "heads": H, "kv_heads": J})
    except (ValueError, KeyError, ZeroDivisionError):
        pass
    raise argparse.ArgumentTypeError(
        f"LAYOUT-Hheads-Jkv_heads with a layout of {sorted(LAYOUTS)} and KV heads that divide the "
        f"heads is required, got {name!r}"
    )


def profile(case: Case, impl: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Times of a case by part, and the sums of magnitudes of its results."""
    from titan_lowprec.ops.attention.kernel import backward_triton, forward_triton

    x, spec = make_inputs(case, torch.device("cuda")), SPECS[impl]

    def run() -> tuple[Any, Any]:
        saved = forward_triton(x.q, x.k, x.v, x.cu_seqlens, spec)
        return saved, backward_triton(x.grad, saved, x.cu_seqlens, spec)

    for _ in range(WARM):
        saved, gradients = run()
    results = {"out": saved.out_NHD, "lse2": saved.lse2_NH}
    results |= {"dq": gradients.dq_NHD, "dk": gradients.dk_NJD, "dv": gradients.dv_NJD}
    sums = {name: float(result.double().abs().sum()) for name, result in results.items()}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    launches = [
        (event.name, event.device_time)
        for event in sorted(profiler.events() or [], key=lambda event: event.time_range.start)
        if event.device_type.name == "CUDA"
    ]
    return times_by_part(launches, REPEATS), sums


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = [parse_case(f"{layout}-H{HEADS}-J{HEADS}") for layout in ("16x4096", "64x1024")]
    parser.add_argument("--cases", nargs="+", type=parse_case, default=default)
    parser.add_argument("--specs", nargs="+", choices=list(SPECS), default=["mxfp8"])
    parser.add_argument("--head_dim", type=int, default=HEAD_DIM)
    parser.add_argument("--output", type=Path, required=True, help="append JSON lines to this file")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_kernels.py: a CUDA device is required, got none")
    shared = {
        "head_dim": options.head_dim,
        **environment(torch.device("cuda")),
        "commit": current_commit(options.commit),
        "run": uuid.uuid4().hex[:12],
        "repeats": REPEATS,
    }
    for impl in options.specs:
        for case in options.cases:
            sized = Case(case.name, {**case.params, "head_dim": options.head_dim})
            times, sums = profile(sized, impl)
            for part, all_us in times.items():
                line = {"op": "attention_kernels", "impl": impl, "case": case.name, "pass": part}
                line["time_us"] = round(statistics.median(all_us), 1)
                line["time_us_range"] = [round(min(all_us), 1), round(max(all_us), 1)]
                with options.output.open("a") as file:
                    file.write(json.dumps(line | {"sums": sums} | shared) + "\n")
            parts = ", ".join(f"{part} {statistics.median(t):.0f}" for part, t in times.items())
            print(f"{case.name} {impl} d={options.head_dim}: {parts} us", flush=True)


if __name__ == "__main__":
    main()
