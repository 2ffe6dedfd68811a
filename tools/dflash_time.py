"""Time a recipe's draft step by part on a GPU: `python tools/dflash_time.py RECIPE`.

One microbatch of the recipe's data, median of --iterations. Arguments after `--` override the
recipe; `--dflash.target_path random` needs no weights.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from titan_lowprec import _autoload


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--iterations", type=int, default=10)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    if not torch.cuda.is_available():
        parser.error("needs a GPU, found none")
    _autoload.assume_cpu_without_accelerator()

    from titan_lowprec.titan.dflash.timing import time_parts
    from titan_lowprec.titan.validate import load_recipe

    config = load_recipe(options.recipe, sys.argv[split + 1 :])
    print(f"{options.recipe}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in time_parts(config, iterations=options.iterations):
        print(f"{part.name:48} {part.time_ms:9.2f} ms  {part.peak_gib:7.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
