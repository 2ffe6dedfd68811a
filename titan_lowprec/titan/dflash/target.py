"""The frozen target: hidden states under ``no_grad``, and its embedding and head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torchtitan.tools.utils import set_default_dtype

from titan_lowprec.models.dflash.decode import TargetStep
from titan_lowprec.models.dflash.tables import FrozenTables, frozen_tables
from titan_lowprec.ops.attention.api import Impl as AttentionImpl
from titan_lowprec.shapes import Float, Int, Int32, Int64, Tensor
from titan_lowprec.titan.dflash.args import DraftModelArgs, target_args
from titan_lowprec.titan.dflash.qwen3 import PackedQwen3
from titan_lowprec.titan.dflash.weights import load_target_weights, read_tables, tables_digest
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.specs import attention_plan

PLAIN = {"embed_scale": 1.0, "output_multiplier": 1.0, "softcap": None}
"""Llama and Qwen3 scale neither embeddings nor logits, and cap nothing."""


@dataclass(frozen=True)
class TargetOutput:
    """What a forward pass of the target leaves."""

    features_BSO: Float[Tensor, "B S O"]
    """Taps side by side, each the output of a decoder layer."""
    hidden_BSE: Float[Tensor, "B S E"] | None
    """After the final norm; ``None`` where layers past the last tap were not run."""


class _Tapped(nn.Module):
    """A target whose ``forward`` returns taps; FSDP hooks onto it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens_BS: Int64[Tensor, "B S"],
        position_BS: Int64[Tensor, "B S"],
        cu_seqlens_BM: Int32[Tensor, "B M"],
        taps: Sequence[int],
        complete: bool,
    ) -> TargetOutput:
        model = self.model
        llama = isinstance(model, LowprecLlama)
        S = tokens_BS.shape[1]
        rope = model.rotation(position_BS, tokens=S) if llama else model.rope_cache
        h = model.tok_embeddings(tokens_BS)
        tapped: dict[int, Tensor] = {}
        for number, layer in enumerate(model.layers.values()):
            h = layer(h, rope, attention_masks=cu_seqlens_BM, positions=position_BS)
            if number in taps:
                tapped[number] = h
            if not complete and number == max(taps):
                break
        features = torch.cat([tapped[number] for number in taps], dim=-1)
        return TargetOutput(features, model.norm(h) if complete else None)


class FrozenTarget:
    """A target that is never trained and is part of no checkpoint."""

    def __init__(
        self, model: Any, tables: FrozenTables, taps: Sequence[int], *, impl: AttentionImpl
    ) -> None:
        self.module = _Tapped(model.requires_grad_(False).eval())
        self.tables = tables
        self.taps = tuple(taps)
        self.impl: AttentionImpl = impl
        self.max_positions: int = model.model_args.max_seq_len

    @torch.no_grad()
    def features(
        self,
        tokens_BS: Int64[Tensor, "B S"],
        *,
        position_BS: Int64[Tensor, "B S"],
        cu_seqlens_BM: Int32[Tensor, "B M"],
    ) -> Float[Tensor, "B S O"]:
        """The taps of packed rows; layers past the last tap do not run."""
        out = self.module(tokens_BS, position_BS, cu_seqlens_BM, self.taps, False)
        return out.features_BSO

    @torch.no_grad()
    def step(self, tokens_S: Int[Tensor, " S"]) -> TargetStep:
        """Logits and taps of one whole sequence, by the target's own attention.

        Raises:
            ValueError: The sequence is longer than the rotary table.
        """
        S = len(tokens_S)
        if self.max_positions < S:
            raise ValueError(
                f"FrozenTarget: sequences must have at most {self.max_positions} tokens, got {S}; "
                "build the target with more positions"
            )
        cu_seqlens = torch.tensor([[0, S]], dtype=torch.int32, device=tokens_S.device)
        position = torch.arange(S, device=tokens_S.device)[None]
        out = self.module(tokens_S.long()[None], position, cu_seqlens, self.taps, True)
        return TargetStep(self.tables.logits(out.hidden_BSE[0]), out.features_BSO[0])

    def logits(self, tokens_S: Int[Tensor, " S"]) -> Float[Tensor, "S V"]:
        """Logits of one whole sequence."""
        return self.step(tokens_S).logits_SV

    def shard(self, mesh: DeviceMesh) -> None:
        """Spread layers over ranks; the tables were taken before and stay whole."""
        for layer in self.module.model.layers.values():
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def target_name(args: DraftModelArgs, tables: FrozenTables) -> str:
    """Flavor and a hash of embedding and head: what stored features say they belong to."""
    return f"{args.target_model} {args.target_flavor} {tables_digest(tables)}"


def build_target(
    args: DraftModelArgs,
    job_config: MergedJobConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
) -> FrozenTarget:
    """Make the target of a flavor and load its weights.

    Args:
        args: With ``draft`` resolved: it has the taps.
        job_config: ``[dflash]`` names the weights, ``[attention]`` the target's attention.
        device: Where it runs.
        dtype: Of weights and hidden states.
        max_positions: Longest document.

    Raises:
        ValueError: The target has no model here, or the weights do not fit it.
    """
    assert args.draft is not None
    if args.target_model == "offline":
        raise ValueError(
            f"dflash.features: must be offline for {args.target_flavor}, whose target has no model "
            "here, got online; write features elsewhere and set features_path"
        )
    own: Any = target_args(args)
    own.max_seq_len = max_positions
    plan = attention_plan(job_config, head_dim=own.head_dim)
    with torch.device("meta"), set_default_dtype(dtype):
        if args.target_model == "llama3":
            own.attention = plan
            model: Any = LowprecLlama(own)
        else:
            model = PackedQwen3(own, plan)
    model.to_empty(device=device)
    path = job_config.dflash.target_path
    load_target_weights(model, path, device=device, seed=job_config.debug.seed or 0)
    tables = frozen_tables(
        model.tok_embeddings.weight,
        model.output.weight,
        tied=args.target.tied,
        **PLAIN,
    )
    return FrozenTarget(model, tables, args.draft.tap_layers, impl=plan.impl)


def build_tables(
    args: DraftModelArgs, job_config: MergedJobConfig, *, device: torch.device, dtype: torch.dtype
) -> FrozenTables:
    """Only embedding and head of a target, for features from disk."""
    target = args.target
    embed, head = read_tables(
        job_config.dflash.target_path,
        vocab_size=target.vocab_size,
        dim=target.dim,
        tied=target.tied,
        seed=job_config.debug.seed or 0,
    )
    on_device = [None if t is None else t.to(device, dtype) for t in (embed, head)]
    assert on_device[0] is not None
    return frozen_tables(on_device[0], on_device[1], tied=target.tied, **PLAIN)
