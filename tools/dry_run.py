"""Build and shard recipes for many ranks without a GPU, and report what one rank holds.

python tools/dry_run.py recipes/llama1b_mxfp8.toml --ranks 8 64
python tools/dry_run.py recipes/llama1b_mxfp8.toml --ranks 1024 --training.global_batch_size 8192
"""

import argparse

import torch  # noqa: F401 - the device probe that is replaced belongs to it

from titan_lowprec import _autoload

GIB = 1024**3


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("recipe", nargs="+")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    arguments, overrides = parser.parse_known_args()
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


if __name__ == "__main__":
    main()
