"""A draft's folder in the layout that public DFlash inference code loads.

``model.safetensors`` with the names of `DraftModel` and ``config.json`` of a Qwen3 model with the
fields that drafts add: ``block_size``, ``num_target_layers`` and ``dflash_config``.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from titan_lowprec.models.dflash.args import DFlashArgs, published_gamma
from titan_lowprec.models.dflash.model import DraftModel

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def hub_config(args: DFlashArgs, *, dtype: torch.dtype, max_positions: int) -> dict[str, Any]:
    """``config.json`` of a draft.

    Args:
        args: The draft.
        dtype: Of the stored weights.
        max_positions: Longest sequence that the draft is meant for.
    """
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": args.vocab_size,
        "hidden_size": args.model_dim,
        "intermediate_size": args.hidden_dim,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * args.layers,
        "torch_dtype": name,
        "block_size": args.block_tokens,
        "num_target_layers": args.target_layers,
        "dflash_config": {
            "mask_token_id": args.mask_id,
            "target_layer_ids": list(args.tap_layers),
        },
    }


def export_draft(
    model: DraftModel, folder: Path, *, dtype: torch.dtype, max_positions: int
) -> None:
    """Write a draft; embedding and head stay the target's and are not written."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in _named(model)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = hub_config(model.args, dtype=dtype, max_positions=max_positions)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _named(model: DraftModel) -> list[tuple[str, torch.Tensor]]:
    return sorted(model.state_dict().items())


def args_from_hub(folder: Path, *, anchor_slots: int, gamma: float | None = None) -> DFlashArgs:
    """A published draft's arguments; what only training needs comes from the caller.

    Args:
        folder: With ``config.json``.
        anchor_slots: Blocks per row.
        gamma: Decay length; ``None`` for the paper's of the draft's block size.

    Raises:
        ValueError: The configuration lacks a field of drafts, or describes one that is not
            implemented (biases, a sliding window, scaled rotary positions).
    """
    config = json.loads((folder / CONFIG).read_text())
    _check(config, where=folder / CONFIG)
    nested = config["dflash_config"]
    rope = config.get("rope_parameters") or {}
    block_tokens = int(config["block_size"])
    return DFlashArgs(
        vocab_size=config["vocab_size"],
        model_dim=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_dim=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or config["rope_theta"],
        tap_layers=tuple(nested["target_layer_ids"]),
        target_layers=config["num_target_layers"],
        mask_id=nested["mask_token_id"],
        block_tokens=block_tokens,
        anchor_slots=anchor_slots,
        gamma=published_gamma(block_tokens=block_tokens) if gamma is None else gamma,
    )


def _check(config: dict[str, Any], *, where: Path) -> None:
    nested = config.get("dflash_config") or {}
    required = {
        "block_size": config.get("block_size"),
        "num_target_layers": config.get("num_target_layers"),
        "dflash_config.mask_token_id": nested.get("mask_token_id"),
        "dflash_config.target_layer_ids": nested.get("target_layer_ids"),
    }
    missing = [name for name, value in required.items() if value is None]
    if missing:
        raise ValueError(
            f"args_from_hub: {where} must have {sorted(required)}, got none of "
            f"{missing}; is it a DFlash draft's?"
        )
    rope = config.get("rope_parameters") or {}
    unsupported = {
        "attention_bias": config.get("attention_bias"),
        "use_sliding_window": config.get("use_sliding_window"),
        "rope_scaling": config.get("rope_scaling"),
        "rope_type": rope.get("rope_type", "default") != "default",
    }
    found = [name for name, value in unsupported.items() if value]
    if found:
        raise ValueError(f"args_from_hub: {where} must not set {found}: not implemented")
