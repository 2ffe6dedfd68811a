"""``python -m titan_lowprec.train``: the trainer without the start-up hook.

The same program as ``torchrun -m torchtitan.train`` with a recipe of this package, for one
process or under ``torchrun -m titan_lowprec.train``.
"""

import os
import socket
import sys

import torch

from titan_lowprec import _autoload


def set_single_process_environment() -> None:
    """Give a process that ``torchrun`` did not start the variables of a world of one."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    defaults = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in defaults.items()})


def main(args: list[str] | None = None) -> None:
    """Train as the command line says.

    Args:
        args: Arguments as for ``torchtitan.train``; ``None`` takes the process's own.
    """
    assert torch.__version__  # `import torch` must precede TorchTitan's device probe
    set_single_process_environment()
    _autoload.assume_cpu_without_accelerator()
    sys.argv[1:] = _autoload.normalize_config_flag(sys.argv[1:] if args is None else args)

    import torchtitan.train as stock

    from titan_lowprec.titan.trainer import make_trainer

    stock.ConfigManager.parse_args.__defaults__ = (sys.argv[1:],)
    stock.main(make_trainer(stock.Trainer))


if __name__ == "__main__":
    main()
