"""Weights of a target from a checkpoint of this package or from Hugging Face files."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from titan_lowprec.models.dflash.tables import FrozenTables
from titan_lowprec.shapes import Float, Tensor
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.llama3.state_dict import LowprecLlamaStateDictAdapter

RANDOM = "random"
EMBEDDINGS = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
NATIVE = ("tok_embeddings.weight", "output.weight")


def path_kind(path: str) -> str | None:
    """``random``, ``checkpoint`` (a step's folder), ``hugging_face``, or ``None`` for neither."""
    if path == RANDOM:
        return RANDOM
    if path and (Path(path) / ".metadata").is_file():
        return "checkpoint"
    if path and any(Path(path).glob("*.safetensors")):
        return "hugging_face"
    return None


def require_weights(path: str) -> None:
    """Refuse a path without weights before anything is built.

    Raises:
        ValueError: There is no checkpoint, no safetensors file, and it is not ``random``.
    """
    if path_kind(path) is None:
        raise _no_weights(path)


def load_target_weights(model: Any, path: str, *, device: torch.device, seed: int) -> None:
    """Fill a target whose storage is empty, in the types it has; rotary tables stay fp32.

    Raises:
        ValueError: The path holds no weights, or not this target's.
    """
    require_weights(path)
    kind = path_kind(path)
    forked = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=forked):  # the draft's draws stay its own
        torch.manual_seed(seed)
        model.init_weights(None)
    if kind == RANDOM:
        return
    state = model.state_dict()
    if kind == "checkpoint":
        try:
            load_checkpoint(state, checkpoint_id=path)
        except Exception as error:
            raise ValueError(
                f"dflash.target_path: {path} must be a checkpoint of the flavor's target, got: "
                f"{error}; name the target that model.flavor stands for"
            ) from error
    else:
        state = _from_hugging_face(model, Path(path))
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"dflash.target_path: {path} must hold the flavor's target, got: {error}; name the "
            "target that model.flavor stands for"
        ) from error


def _from_hugging_face(model: Any, folder: Path) -> dict[str, Any]:
    args: Any = model.model_args
    adapter: BaseStateDictAdapter = Qwen3StateDictAdapter(args, None)
    if isinstance(model, LowprecLlama):
        adapter = LowprecLlamaStateDictAdapter(args, None)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensors[name] = opened.get_tensor(name)
    if HEADS[0] not in tensors:  # a tied checkpoint
        tensors[HEADS[0]] = tensors[EMBEDDINGS[0]]
    return adapter.from_hf(tensors)


def read_tables(
    path: str, *, vocab_size: int, dim: int, tied: bool, seed: int
) -> tuple[Float[Tensor, "V E"], Float[Tensor, "V E"] | None]:
    """Embedding and head of a target, nothing else; the head is ``None`` for a tied one.

    Raises:
        ValueError: The path does not hold them in the right shape.
    """
    kind = path_kind(path)
    if kind == RANDOM:
        generator = torch.Generator().manual_seed(seed)
        embed, head = (torch.randn(vocab_size, dim, generator=generator) for _ in range(2))
        return embed, None if tied else head * dim**-0.5
    require_weights(path)
    found = _checkpoint_tables(path) if kind == "checkpoint" else _hugging_face_tables(Path(path))
    for name, table in zip(("embedding", "head"), found, strict=True):
        if table is None and (name == "embedding" or not tied):
            raise ValueError(
                f"dflash.target_path: {path} must hold the target's {name}, got none; add the "
                "file that has it"
            )
        if table is not None and table.shape != (vocab_size, dim):
            raise ValueError(
                f"dflash.target_path: the target's {name} must be {(vocab_size, dim)}, got "
                f"{tuple(table.shape)} in {path}; name the target that model.flavor stands for"
            )
    assert found[0] is not None
    return found[0], None if tied else found[1]


def _checkpoint_tables(path: str) -> tuple[Tensor | None, Tensor | None]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)  # pyright: ignore
        for name in NATIVE
        if name in metadata
    }
    load_checkpoint(state, checkpoint_id=path)
    return state.get(NATIVE[0]), state.get(NATIVE[1])


def _hugging_face_tables(folder: Path) -> tuple[Tensor | None, Tensor | None]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in set(opened.keys()) & {*EMBEDDINGS, *HEADS}:
                found[name] = opened.get_tensor(name)
    embed = next((found[name] for name in EMBEDDINGS if name in found), None)
    return embed, next((found[name] for name in HEADS if name in found), None)


def tables_digest(tables: FrozenTables) -> str:
    """Hash of a sample of embedding and head, equal for fp32 and bf16: enough to tell targets."""
    digest = hashlib.sha256()
    for table in (tables.embed_VE, tables.head_VE):
        flat = table.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 4096)].bfloat16().float().cpu()
        digest.update(f"{tuple(table.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _no_weights(path: str) -> ValueError:
    return ValueError(
        "dflash.target_path: must be a step of a checkpoint (.../checkpoint/step-200), a folder "
        f"with *.safetensors, or {RANDOM!r}, got {path!r}; train the target first or correct the "
        "path"
    )
