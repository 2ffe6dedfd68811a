"""Build and shard recipes for many ranks without a GPU, and report what one rank holds.

python tools/dry_run.py recipes/llama1b_mxfp8.toml --ranks 8 64
python tools/dry_run.py recipes/llama1b_mxfp8.toml --ranks 1024 --training.global_batch_size 8192
"""

import argparse
import sys

import torch  # noqa: F401 - the device probe that is replaced belongs to it

from titan_lowprec import _autoload
from titan_lowprec.titan.recipe_tool import exit_status, parse_with_overrides

GIB = 1024**3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe", nargs="+")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    arguments, overrides = parse_with_overrides(parser, sys.argv[1:])
    _autoload.assume_cpu_without_accelerator()  # before TorchTitan is imported
    from titan_lowprec.titan.dry_run import shard_on_meta
    from titan_lowprec.titan.validate import load_recipe

    print("| recipe | ranks | parameters | of one rank | its states | estimated peak |")
    print("|---|---|---|---|---|---|")
    for recipe in arguments.recipe:
        for ranks in arguments.ranks:
            size = shard_on_meta(load_recipe(recipe, overrides), world_size=ranks)
            print(
                f"| {recipe} | {ranks:,} | {size.parameters:,} | {size.local_parameters:,} "
                f"| {size.local_bytes / GIB:.2f} GiB | {size.estimate.total / GIB:.1f} GiB |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
