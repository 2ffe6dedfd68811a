"""What the thin command lines in ``tools/`` share: a recipe, its overrides, errors in one line."""

import argparse
import sys
from collections.abc import Callable


def parse_with_overrides(
    parser: argparse.ArgumentParser, args: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Read a tool's own options; what it does not know overrides the recipe, as in training.

    Args:
        parser: The tool's options, spelled in full on the command line.
        args: Arguments without the program; everything after a ``--`` is an override.

    Returns:
        Options and overrides.
    """
    split = args.index("--") if "--" in args else len(args)
    options, overrides = parser.parse_known_args(args[:split])
    return options, [*overrides, *args[split + 1 :]]


def exit_status(main: Callable[[], int]) -> int:
    """Run a tool; a caller's mistake ends it with status 2 and its message, not a traceback."""
    try:
        return main()
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
