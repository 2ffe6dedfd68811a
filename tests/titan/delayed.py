"""The program with steps read one later, as on a GPU: ``python -m tests.titan.delayed``."""

import torch

from titan_lowprec import _autoload

assert torch.__version__  # before TorchTitan's device probe is told
_autoload.assume_cpu_without_accelerator()

from titan_lowprec import train  # noqa: E402
from titan_lowprec.titan import trainer  # noqa: E402
from titan_lowprec.titan.outcome import Outcomes  # noqa: E402


class Delayed(Outcomes):
    """Reads a step after the next one was queued, on a CPU as well."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._delay = 1


if __name__ == "__main__":
    trainer.Outcomes = Delayed
    train.main()
