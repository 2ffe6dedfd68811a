"""Time the steps of a draft's recipe, and their parts: `python tools/dflash_time.py RECIPE`.

The recipe's own trainer runs --warmup + --steps optimizer steps, without checkpoints and
validation. Other arguments override the recipe; `--dflash.target_path random` needs no
weights. On a GPU times are the device's and peaks the allocator's; on a CPU there are no peaks.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from titan_lowprec import _autoload
from titan_lowprec.titan.recipe_tool import exit_status, parse_with_overrides
from titan_lowprec.train import set_single_process_environment


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=50, help="steps to count (default 50)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default 3)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no step later than that"
    )
    parser.add_argument("--output", help="file that a line of JSON is appended to")
    options, overrides = parse_with_overrides(parser, sys.argv[1:])
    _autoload.assume_cpu_without_accelerator()
    set_single_process_environment()

    from titan_lowprec.titan.dflash.timing import time_steps
    from titan_lowprec.titan.run_record import collect_versions
    from titan_lowprec.titan.validate import load_recipe

    with tempfile.TemporaryDirectory() as folder:
        config = load_recipe(options.recipe, [*overrides, f"--job.dump_folder={folder}"])
        times = time_steps(
            config, steps=options.steps, warmup=options.warmup, seconds=options.seconds
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = times.as_json()
    print(f"{options.recipe} {' '.join(overrides)}, {device}, torch {torch.__version__}")
    print(
        f"{times.steps} steps, median {found['step_ms_median']:.1f} ms, 10 % to 90 % "
        f"{found['step_ms_10_percent']:.1f} to {found['step_ms_90_percent']:.1f}; losses "
        f"{times.losses[0]:.4f} to {times.losses[-1]:.4f}; a query sees {times.visible:.1%} of keys"
    )
    for part in times.parts:
        memory = ""
        if part.peak_gib is not None:
            memory = f"{part.peak_gib:9.2f} GiB, {part.added_gib:7.2f} above its beginning"
        print(f"{part.name:40} {part.time_ms:10.2f} ms {part.calls:3} calls {memory}")
    if options.output:
        line = {"recipe": options.recipe, "overrides": overrides, "device": device}
        with Path(options.output).open("a") as file:
            file.write(json.dumps({**line, **found, "versions": collect_versions()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
