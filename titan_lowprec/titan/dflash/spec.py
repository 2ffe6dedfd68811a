"""The train spec ``dflash``."""

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.protocols.train_spec import TrainSpec

from titan_lowprec.titan.dflash.args import FLAVORS
from titan_lowprec.titan.dflash.loader import build_draft_loader
from titan_lowprec.titan.dflash.metrics import build_draft_metrics
from titan_lowprec.titan.dflash.model import TitanDraft
from titan_lowprec.titan.dflash.objective import build_draft_objective
from titan_lowprec.titan.dflash.parallelize import parallelize_draft
from titan_lowprec.titan.dflash.state_dict import DraftStateDictAdapter
from titan_lowprec.titan.dflash.validator import build_draft_validator

DFLASH = TrainSpec(
    model_cls=TitanDraft,  # pyright: ignore[reportArgumentType] (duck-typed)
    model_args=FLAVORS,
    parallelize_fn=parallelize_draft,
    pipelining_fn=None,
    build_optimizers_fn=build_optimizers,
    build_lr_schedulers_fn=build_lr_schedulers,
    build_dataloader_fn=build_draft_loader,  # pyright: ignore[reportArgumentType] (duck-typed)
    build_tokenizer_fn=None,
    build_loss_fn=build_draft_objective,
    build_validator_fn=build_draft_validator,
    build_metrics_processor_fn=build_draft_metrics,
    state_dict_adapter=DraftStateDictAdapter,
)
