"""Export a draft in Hugging Face's layout: `python tools/dflash_export.py RECIPE --out FOLDER`.

Writes model.safetensors and config.json, which public DFlash inference code loads; embedding and
head stay the target's. The newest checkpoint of the recipe's dump folder is taken unless --draft
names a step. Other arguments override the recipe.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from titan_lowprec import _autoload
from titan_lowprec.titan.recipe_tool import exit_status, parse_with_overrides

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> int:
    """Read the checkpoint, write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="step of a checkpoint; the newest as written")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    options, overrides = parse_with_overrides(parser, sys.argv[1:])
    _autoload.assume_cpu_without_accelerator()

    from titan_lowprec.models.dflash.hub import export_draft
    from titan_lowprec.titan.dflash.evaluate import latest_step, load_draft
    from titan_lowprec.titan.dflash.store import resolved_args
    from titan_lowprec.titan.validate import load_recipe

    config = load_recipe(options.recipe, overrides)
    step = options.draft or latest_step(config)
    model = load_draft(resolved_args(config), step, device=torch.device("cpu"))
    export_draft(
        model,
        options.out,
        dtype=DTYPES[options.dtype],
        max_positions=config.training.seq_len,
    )
    print(f"{options.out}: draft of {step} in {options.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
