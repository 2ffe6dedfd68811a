"""Store rows for drafts: `python tools/dflash_features.py recipes/dflash_tiny.toml --out FOLDER`.

Writes the target's hidden states of the recipe's documents (features = "offline"). With --answers
documents are cut to prompts and continued by the target greedily, as the paper trains; with
--tokens-only hidden states are left out, for features = "online". An interrupted run continues with
the same command; `torchrun --nproc_per_node=N tools/dflash_features.py ...` shards by rank.
--import-specforge reads {input_ids, loss_mask, hidden_states} files instead. Other arguments
override the recipe.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from titan_lowprec import _autoload
from titan_lowprec.titan.recipe_tool import exit_status, parse_with_overrides


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; unknown arguments belong to the recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--rows", type=int, help="rows of all ranks; an epoch as written")
    parser.add_argument("--answers", action="store_true")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--tokens-only", action="store_true")
    parser.add_argument("--shard-batches", type=int, default=16, help="batches of a file")
    parser.add_argument("--import-specforge", type=Path, nargs="+", metavar="FILE")
    return parse_with_overrides(parser, sys.argv[1:])


def main() -> int:
    """Write, and say what is there."""
    options, overrides = parse_arguments()
    assert torch.__version__  # `import torch` must precede TorchTitan's device probe
    _autoload.assume_cpu_without_accelerator()

    from titan_lowprec.titan.dflash.rows import Answers
    from titan_lowprec.titan.dflash.store import StoreOptions, import_specforge, store_rows
    from titan_lowprec.titan.validate import load_recipe

    config = load_recipe(options.recipe, overrides)
    if options.import_specforge:
        index = import_specforge(
            config, options.import_specforge, options.out, shard_records=options.shard_batches
        )
    else:
        answers = None
        if options.answers:
            answers = Answers(options.prompt_tokens, options.answer_tokens)
        store = StoreOptions(
            folder=options.out,
            rows=options.rows,
            answers=answers,
            tokens_only=options.tokens_only,
            shard_batches=options.shard_batches,
        )
        index = store_rows(config, store)
    if index is not None:
        size = sum(shard.bytes for shard in index.shards)
        print(
            f"{options.out}: {index.records} rows, {index.tokens:,} tokens, {index.candidates:,} "
            f"candidates for anchors, {size / 1e6:,.1f} MB in {len(index.shards)} files"
        )
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
