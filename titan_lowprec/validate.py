"""``python -m titan_lowprec.validate recipes/*.toml``: check recipes without a device."""

import sys

import torch

from titan_lowprec import _autoload


def main(args: list[str] | None = None) -> int:
    """Validate the recipes that the command line names.

    Args:
        args: Arguments; ``None`` takes the process's own.

    Returns:
        The exit status, 0 if every recipe is good.
    """
    assert torch.__version__  # `import torch` must precede TorchTitan's device probe
    _autoload.assume_cpu_without_accelerator()

    from titan_lowprec.titan.validate import validate_recipes

    return validate_recipes(sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    sys.exit(main())
