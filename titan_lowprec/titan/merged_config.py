"""The type of a job file after TorchTitan merged our sections into its own; for annotations.

The class that exists at run time is made by ``ConfigManager``, field by field, and is related to
neither; there ``MergedJobConfig`` stands for any object.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.config import job_config as stock

    from titan_lowprec.titan import job_config as ours

    class Model(ours.Model, stock.Model):
        """``[model]``."""

    class Training(ours.Training, stock.Training):
        """``[training]``."""

    class Parallelism(ours.Parallelism, stock.Parallelism):
        """``[parallelism]``."""

    class ActivationCheckpoint(ours.ActivationCheckpoint, stock.ActivationCheckpoint):
        """``[activation_checkpoint]``."""

    class Checkpoint(ours.Checkpoint, stock.Checkpoint):
        """``[checkpoint]``."""

    class Metrics(ours.Metrics, stock.Metrics):
        """``[metrics]``."""

    class MergedJobConfig(stock.JobConfig):
        """Every section that a recipe may have."""

        model: Model
        attention: ours.Attention
        loss: ours.Loss
        data: ours.Data
        dflash: ours.DFlash
        training: Training
        parallelism: Parallelism
        activation_checkpoint: ActivationCheckpoint
        graph: ours.Graph
        checkpoint: Checkpoint
        metrics: Metrics
else:
    MergedJobConfig = Any
