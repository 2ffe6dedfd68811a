"""The draft model as TorchTitan's trainer wants it."""

from typing import cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.titan.dflash.args import DraftModelArgs
from titan_lowprec.titan.llama3.model import canonical_name


class TitanDraft(DraftModel):
    """`DraftModel` with TorchTitan's constructor and initialisation; tensor names are unchanged."""

    def __init__(self, model_args: DraftModelArgs) -> None:
        assert model_args.draft is not None, "update_from_config resolves the draft"
        super().__init__(model_args.draft)
        self.model_args = model_args

    def init_weights(  # pyright: ignore[reportIncompatibleMethodOverride] (TorchTitan's)
        self, buffer_device: torch.device | None = None
    ) -> None:
        """Draw the weights; sharded on CPUs, as one process would draw them.

        DTensor has no sharded random generator for CPU meshes: an unsharded twin is drawn there.
        """
        del buffer_device
        weight = self.fc.weight
        if not (isinstance(weight, DTensor) and weight.device.type == "cpu"):
            super().init_weights()
            return
        twin = DraftModel(self.args)
        twin.init_weights()
        values = dict(twin.named_parameters())
        for name, parameter in self.named_parameters():
            sharded = cast(DTensor, parameter)
            value = values[canonical_name(name)].to(sharded.dtype)
            sharded.copy_(distribute_tensor(value, sharded.device_mesh, sharded.placements))
