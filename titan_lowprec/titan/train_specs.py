"""The train specs that this package offers to ``model.name``."""

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.protocols.train_spec import TrainSpec

from titan_lowprec.titan.dataloader import build_dataloader
from titan_lowprec.titan.dflash.spec import DFLASH
from titan_lowprec.titan.llama3.args import FLAVORS
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.llama3.state_dict import LowprecLlamaStateDictAdapter
from titan_lowprec.titan.loss import build_loss
from titan_lowprec.titan.metrics import build_metrics_processor
from titan_lowprec.titan.parallelize import parallelize_llama
from titan_lowprec.titan.validator import build_validator

TRAIN_SPECS = {
    "llama3_lowprec": TrainSpec(
        model_cls=LowprecLlama,
        model_args=FLAVORS,
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,  # pyright: ignore[reportArgumentType] (duck-typed)
        build_tokenizer_fn=None,  # documents are tokenised by the loader
        build_loss_fn=build_loss,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
        state_dict_adapter=LowprecLlamaStateDictAdapter,
    ),
    "dflash": DFLASH,
}
