"""Registration with TorchTitan 0.2.2: what a recipe's two module settings import.

``job.custom_config_module`` takes ``JobConfig`` from here while the command line is parsed, and
``experimental.custom_import`` imports the module again before the train spec is looked up.
Importing it twice, or in a process that does not train, changes nothing more.
"""

import sys

from torchtitan.protocols import train_spec as stock_specs

from titan_lowprec.titan.job_config import JobConfig
from titan_lowprec.titan.train_specs import TRAIN_SPECS
from titan_lowprec.titan.trainer import make_trainer

__all__ = ["JobConfig"]


def register_train_specs() -> None:
    """Make our models known to ``model.name``."""
    for name, spec in TRAIN_SPECS.items():
        if name not in stock_specs._extra_train_specs:
            stock_specs.register_train_spec(name, spec)


def adopt_running_trainer() -> None:
    """Make ``python -m torchtitan.train`` construct our trainer: the one patch of this package.

    Target: ``__new__`` of the ``Trainer`` class of the running ``torchtitan.train``. Reason: 0.2.2
    has no setting for the trainer class, and its ``train_step`` cannot skip a non-finite step or
    count documents. Upstream version: 0.2.2. Done only where ``torchtitan.train`` is the program.
    """
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) != "torchtitan.train":
        return
    stock = main.Trainer
    if "__new__" in vars(stock):
        return
    ours = make_trainer(stock)

    def construct(cls: type, *args: object, **kwargs: object) -> object:
        del args, kwargs
        return object.__new__(ours if cls is stock else cls)

    stock.__new__ = construct


register_train_specs()
adopt_running_trainer()
