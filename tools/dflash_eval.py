"""Real speculative decoding: `python tools/dflash_eval.py recipes/dflash_tiny.toml`.

Decodes beginnings of validation documents greedily, with the draft and without, and prints the
acceptance length, how many tokens verifications added, calls to the target saved, and whether the
output is plain greedy decoding's: in fp32 on a CPU it must be (exit status 1 otherwise); in bf16
the first difference is shown with its logit margin. Other arguments override the recipe.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from titan_lowprec import _autoload
from titan_lowprec.titan.recipe_tool import exit_status, parse_with_overrides

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; unknown arguments belong to the recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--draft", type=Path, help="step of a checkpoint, or an export's folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parse_with_overrides(parser, sys.argv[1:])


def main() -> int:
    """Run the evaluation."""
    options, overrides = parse_arguments()
    _autoload.assume_cpu_without_accelerator()

    from titan_lowprec.titan.dflash.evaluate import evaluate_recipe
    from titan_lowprec.titan.validate import load_recipe

    result = evaluate_recipe(
        load_recipe(options.recipe, overrides),
        draft=options.draft,
        dtype=DTYPES[options.dtype],
        prompts=options.prompts,
        prompt_tokens=options.prompt_tokens,
        max_new_tokens=options.new_tokens,
    )
    print(result.report())
    if options.json is not None:
        options.json.write_text(json.dumps(result.as_json(), indent=1) + "\n")
    exact = options.dtype == "float32" and not torch.cuda.is_available()
    return int(exact and bool(result.divergences))


if __name__ == "__main__":
    sys.exit(exit_status(main))
