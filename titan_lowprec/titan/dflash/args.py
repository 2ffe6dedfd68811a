"""Model arguments and flavors of ``dflash``: sizes of a draft and the target it belongs to."""

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn as nn
from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args
from torchtitan.protocols.model import BaseModelArgs

from titan_lowprec.models.dflash.args import DFlashArgs, resolve_mask_id, tap_layers
from titan_lowprec.models.dflash.attention import Impl
from titan_lowprec.ops.cross_entropy.api import Impl as HeadImpl
from titan_lowprec.titan.dflash.vocabulary import Vocabulary, vocabulary_of
from titan_lowprec.titan.llama3.args import FLAVORS as LLAMA_FLAVORS
from titan_lowprec.titan.merged_config import MergedJobConfig

QWEN3_TINY = Qwen3ModelArgs(
    vocab_size=2048, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384
)
QWEN3_FLAVORS: dict[str, Qwen3ModelArgs] = {"tiny": QWEN3_TINY, **qwen3_args}


@dataclass(frozen=True)
class TargetShape:
    """What a draft must know of its target, also of one that never runs in this process."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    tied: bool


OFFLINE_TARGETS = {
    # Kimi K2's text model: 61 layers, 7,168 wide
    "kimi_k2": TargetShape(163840, 7168, 61, 64, 64, 128, 50000.0, False)
}
"""Targets whose features come from disk only."""


@dataclass
class DraftModelArgs(BaseModelArgs):
    """A flavor; ``update_from_config`` adds what the job file decides."""

    target_model: Literal["llama3", "qwen3", "offline"] = "llama3"
    target_flavor: str = "tiny"
    layers: int = 5
    heads: int = 32
    kv_heads: int = 8
    draft_head_dim: int = 128
    hidden_dim: int = 12288
    norm_eps: float = 1e-6
    taps: tuple[int, ...] = ()
    """Tapped layers where the recipe names none; empty for the paper's rule."""

    draft: DFlashArgs | None = None
    attention_impl: Impl = "reference"
    head_impl: HeadImpl = "reference"

    @property
    def target(self) -> TargetShape:
        """The target's sizes."""
        if self.target_model == "offline":
            return OFFLINE_TARGETS[self.target_flavor]
        args = target_args(self)
        return TargetShape(
            vocab_size=args.vocab_size,
            dim=args.dim,
            n_layers=args.n_layers,
            n_heads=args.n_heads,
            n_kv_heads=args.n_kv_heads or args.n_heads,
            head_dim=args.head_dim,
            rope_theta=float(args.rope_theta),
            tied=getattr(args, "enable_weight_tying", False),
        )

    # what the rules of [attention] and [data] read: that section is the target's
    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def head_dim(self) -> int:
        return self.target.head_dim

    @property
    def n_layers(self) -> int:
        return self.target.n_layers

    @property
    def n_heads(self) -> int:
        return self.target.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.target.n_kv_heads

    def update_from_config(self, job_config: MergedJobConfig, **kwargs: object) -> None:
        """Resolve block, taps, mask token and implementations, once."""
        del kwargs
        from titan_lowprec.titan.dflash.choices import attention_choice, head_choice

        self.draft = draft_args(self, job_config, vocabulary_of(job_config))
        self.attention_impl = attention_choice(job_config)
        self.head_impl = head_choice(job_config)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters of the draft, and its FLOPs per token of a row with every slot used."""
        from titan_lowprec.titan.dflash.flops import DraftWork, draft_step_flops

        assert self.draft is not None
        work = DraftWork(
            tokens=seq_len,
            attention_pairs=seq_len * (seq_len + 1) // 2,
            anchors=self.draft.anchor_slots,
            target_parameters=0,
            target_attention=0,
        )
        flops = draft_step_flops(self.draft, work)
        return sum(parameter.numel() for parameter in model.parameters()), flops // seq_len


def target_args(args: DraftModelArgs) -> Any:
    """A copy of the target's own arguments: Llama's or Qwen3's."""
    flavors: dict[str, Any] = LLAMA_FLAVORS if args.target_model == "llama3" else QWEN3_FLAVORS
    return copy.deepcopy(flavors[args.target_flavor])


def draft_args(
    args: DraftModelArgs, job_config: MergedJobConfig, vocabulary: Vocabulary
) -> DFlashArgs:
    """The draft's arguments of a flavor and a ``[dflash]`` section.

    Raises:
        ValueError: Taps, mask token, decay or a size cannot be.
    """
    section, target = job_config.dflash, args.target
    taps = tuple(section.taps) or args.taps
    taps = taps or tap_layers(target_layers=target.n_layers, taps=args.layers)
    mask_id = resolve_mask_id(
        explicit=None if section.mask_id < 0 else section.mask_id,
        draft_config={},
        tokenizer_mask_id=vocabulary.mask_id,
        tokenizer_size=vocabulary.entries,
        vocab_size=target.vocab_size,
        eos_ids=vocabulary.eos_ids,
    )
    return DFlashArgs(
        vocab_size=target.vocab_size,
        model_dim=target.dim,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.draft_head_dim,
        hidden_dim=args.hidden_dim,
        norm_eps=args.norm_eps,
        rope_theta=target.rope_theta,
        tap_layers=taps,
        target_layers=target.n_layers,
        mask_id=mask_id,
        block_tokens=section.block_tokens,
        anchor_slots=section.anchor_slots,
        gamma=section.gamma,
    )


def _tiny(target_model: Literal["llama3", "qwen3"]) -> DraftModelArgs:
    return DraftModelArgs(
        target_model=target_model,
        target_flavor="tiny",
        layers=2,
        heads=4,
        kv_heads=2,
        draft_head_dim=32,
        hidden_dim=384,
        taps=(1, 2),
    )


FLAVORS: dict[str, DraftModelArgs] = {
    # 2 CPU cores, minutes
    "tiny": _tiny("llama3"),
    "tiny_qwen3": _tiny("qwen3"),
    # a tied target; a GPU in seconds
    "qwen3_0p6b": DraftModelArgs(
        target_model="qwen3", target_flavor="0.6B", heads=16, hidden_dim=3072
    ),
    # the paper's: 5 layers, taps 1, 9, 17, 25, 33
    "qwen3_8b": DraftModelArgs(target_model="qwen3", target_flavor="8B"),
    "llama3_8b": DraftModelArgs(
        target_model="llama3", target_flavor="8B", hidden_dim=14336, norm_eps=1e-5
    ),
    # 163,840 entries; features from disk
    "kimi_k2": DraftModelArgs(
        target_model="offline", target_flavor="kimi_k2", heads=64, hidden_dim=18432
    ),
}
