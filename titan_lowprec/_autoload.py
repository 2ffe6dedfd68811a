"""Let ``torchrun -m torchtitan.train --job.config recipe.toml`` run a recipe of this package.

PyTorch calls ``install`` at the end of ``import torch`` in every process of the environment
(entry-point group ``torch.backends``), so this module imports ``sys`` and ``os`` only, never
raises, and does nothing at all unless the process runs ``torchtitan.train`` with a configuration
that names ``titan_lowprec``. There it does two things that TorchTitan 0.2.2 needs before any of
its own code runs:

* ``--job.config`` is spelled ``--job.config_file``, in place, in ``sys.argv``;
* without an accelerator, TorchTitan is told ``"cpu"`` where it would assume CUDA.

The first is done for a configuration that does not exist, too: TorchTitan then reports the missing
file, not an unknown flag.

``TITAN_LOWPREC_AUTOLOAD=0`` switches it off; ``python -m titan_lowprec.train`` never needs it.
"""

import os
import sys

MODULE = "torchtitan.train"
PLUGIN = "titan_lowprec"
SWITCH = "TITAN_LOWPREC_AUTOLOAD"
CONFIG_FLAGS = ("--job.config", "--job.config_file", "--job.config-file")


def install() -> None:
    """Prepare this process for a recipe of ours; leave every other process as it is."""
    try:
        if os.environ.get(SWITCH, "1") == "0" or not runs_module(sys.orig_argv, MODULE):
            return
        if names_plugin(sys.argv[1:]):
            sys.argv[1:] = normalize_config_flag(sys.argv[1:])
            assume_cpu_without_accelerator()
        elif names_no_file(sys.argv[1:]):  # TorchTitan then misses the file, not the flag
            sys.argv[1:] = normalize_config_flag(sys.argv[1:])
    except Exception:  # an error here would break every `import torch` of the environment
        return


def runs_module(orig_argv: list[str], module: str) -> bool:
    """True if the interpreter was started with ``-m module``, so not inside ``torchrun`` itself."""
    takes_value = ("-X", "-W", "--check-hash-based-pycs")
    index = 1
    while index < len(orig_argv):
        argument = orig_argv[index]
        if argument == "-m":
            return orig_argv[index + 1 : index + 2] == [module]
        if not argument.startswith("-") or argument == "-c":
            return False
        index += 2 if argument in takes_value else 1
    return False


def config_path(args: list[str]) -> str | None:
    """The recipe that the command line names, in any of the accepted spellings."""
    for index, argument in enumerate(args):
        flag, equals, value = argument.partition("=")
        if flag in CONFIG_FLAGS:
            return value if equals else next(iter(args[index + 1 : index + 2]), None)
    return None


def names_plugin(args: list[str]) -> bool:
    """True if the command line, or the recipe it names, mentions this package's modules."""
    if any(argument.partition("=")[2].startswith(f"{PLUGIN}.") for argument in args) or any(
        argument.startswith(f"{PLUGIN}.") for argument in args
    ):
        return True
    path = config_path(args)
    if path is None or not os.path.isfile(path):
        return False
    with open(path, "rb") as recipe:
        return any(
            f"{PLUGIN}.".encode() in line and not line.lstrip().startswith(b"#") for line in recipe
        )


def names_no_file(args: list[str]) -> bool:
    """True if a recipe is named that does not exist."""
    path = config_path(args)
    return path is not None and not os.path.exists(path)


def normalize_config_flag(args: list[str]) -> list[str]:
    """Spell ``--job.config`` the way that TorchTitan 0.2.2 knows it; other arguments are kept."""
    return [
        "--job.config_file" + argument[len("--job.config") :]
        if argument == "--job.config" or argument.startswith("--job.config=")
        else argument
        for argument in args
    ]


def assume_cpu_without_accelerator() -> None:
    """Make PyTorch's private device probe, which TorchTitan asks, answer ``"cpu"`` for none."""
    utils = sys.modules["torch._utils"]
    probe = utils._get_available_device_type
    if getattr(probe, "titan_lowprec", False):
        return

    def available_device_type() -> str:
        return probe() or "cpu"

    available_device_type.titan_lowprec = True  # pyright: ignore[reportFunctionMemberAccess]
    setattr(utils, "_get_available_device_type", available_device_type)  # noqa: B010 (no type stub)
