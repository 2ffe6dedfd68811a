"""The draft in Hugging Face's layout: published DFlash checkpoints have our tensor names."""

from typing import Any

from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from titan_lowprec.titan.dflash.args import DraftModelArgs

TABLES = ("embed_tokens.weight", "model.embed_tokens.weight", "lm_head.weight")
"""The target's; some published checkpoints carry them along."""


class DraftStateDictAdapter(StateDictAdapter):
    """Names are equal on both sides; embedding and head are neither written nor read."""

    def __init__(self, model_args: DraftModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, None)
        del hf_assets_path  # an index there would be the target's

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Names of published checkpoints."""
        return dict(state_dict)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our names."""
        return {name: t for name, t in hf_state_dict.items() if name not in TABLES}
