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
from attention import HEAD_DIM, HEADS, SPECS
from attention import LAYOUTS as TIMED_LAYOUTS

from titan_lowprec.titan.run_record import collect_versions

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


def profile(case: str, impl: str, head_dim: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Times of a case by part, and the sums of magnitudes of its results."""
    from titan_lowprec.ops.attention.kernel import backward_triton, forward_triton

    layout, heads, kv_heads = parse_case(case)
    lengths, spec = LAYOUTS[layout], SPECS[impl]
    torch.manual_seed(0)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)[None]
    q, grad, k, v = (
        torch.randn(sum(lengths), n, head_dim, device="cuda", dtype=torch.bfloat16)
        for n in (heads, heads, kv_heads, kv_heads)
    )

    def run() -> tuple[Any, Any]:
        saved = forward_triton(q, k, v, offsets, spec)
        return saved, backward_triton(grad, saved, offsets, spec)

    for _ in range(WARM):
        saved, gradients = run()
    results = {"out": saved.out_NHD, "lse2": saved.lse2_NH}
    results |= {"dq": gradients.dq_NHD, "dk": gradients.dk_NJD, "dv": gradients.dv_NJD}
    sums = {name: float(x.double().abs().sum()) for name, x in results.items()}
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


def parse_case(case: str) -> tuple[str, int, int]:
    """Layout, heads and KV heads of a name like ``16x4096-H16-J4``."""
    try:
        layout, heads, kv_heads = case.rsplit("-", 2)
        numbers = int(heads.removeprefix("H")), int(kv_heads.removeprefix("J"))
        if layout in LAYOUTS and numbers[0] % numbers[1] == 0:
            return layout, *numbers
    except (ValueError, ZeroDivisionError):
        pass
    raise argparse.ArgumentTypeError(
        f"LAYOUT-Hheads-Jkv_heads with a layout of {sorted(LAYOUTS)} and KV heads that divide the "
        f"heads is required, got {case!r}"
    )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", default=[f"{n}-H{HEADS}-J{HEADS}" for n in ("16x4096", "64x1024")]
    )
    parser.add_argument("--specs", nargs="+", choices=list(SPECS), default=["mxfp8"])
    parser.add_argument("--head_dim", type=int, default=HEAD_DIM)
    parser.add_argument("--output", type=Path, required=True, help="append JSON lines to this file")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    options = parser.parse_args()
    for case in options.cases:
        try:
            parse_case(case)
        except argparse.ArgumentTypeError as error:
            parser.error(f"--cases: {error}")
    if not torch.cuda.is_available():
        sys.exit("attention_kernels.py: a CUDA device is required, got none")
    versions = collect_versions()
    shared = {
        "head_dim": options.head_dim,
        "device": torch.cuda.get_device_name(),
        "versions": {name: versions[name] for name in ("python", "torch", "triton")},
        "commit": options.commit or versions["commit"],
        "run": uuid.uuid4().hex[:12],
        "repeats": REPEATS,
    }
    for name in options.specs:
        for case in options.cases:
            times, sums = profile(case, name, options.head_dim)
            for part, all_us in times.items():
                line = {"op": "attention_kernels", "impl": name, "case": case, "pass": part}
                line["time_us"] = round(statistics.median(all_us), 1)
                line["time_us_range"] = [round(min(all_us), 1), round(max(all_us), 1)]
                with options.output.open("a") as file:
                    file.write(json.dumps(line | {"sums": sums} | shared) + "\n")
            parts = ", ".join(f"{part} {statistics.median(t):.0f}" for part, t in times.items())
            print(f"{case} {name} d={options.head_dim}: {parts} us", flush=True)


if __name__ == "__main__":
    main()
