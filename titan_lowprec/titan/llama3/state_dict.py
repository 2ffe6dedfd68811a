"""Hugging Face Llama checkpoints, tied ones included."""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from titan_lowprec.titan.llama3.args import LowprecLlamaArgs

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class LowprecLlamaStateDictAdapter(Llama3StateDictAdapter):
    """TorchTitan's adapter, which can also load a checkpoint without ``lm_head.weight``.

    Such a checkpoint ties its head to the embedding. The model here is untied, so its head starts
    as a copy and is exported as a tensor of its own.
    """

    def __init__(self, model_args: LowprecLlamaArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.requested: dict[str, Any] = {}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Names and RoPE layout of Hugging Face."""
        self.requested = super().to_hf(state_dict)
        return self.requested

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        """Open a checkpoint folder; of a tied one, no head is requested.

        TorchTitan 0.2.2 calls this between ``to_hf`` and the load of what that returned.
        """
        if not has_tensor(Path(path), HEAD):
            self.requested.pop(HEAD, None)
        return super().get_hf_storage_reader(path, from_quantized)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Names and RoPE layout of TorchTitan; a missing head is the embedding."""
        if HEAD not in hf_state_dict:
            hf_state_dict = {**hf_state_dict, HEAD: hf_state_dict[EMBEDDING]}
        return super().from_hf(hf_state_dict)


def has_tensor(folder: Path, name: str) -> bool:
    """True if one of a folder's safetensors files holds the tensor."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (not a dict)
                return True
    return False
