"""The ``[dflash]`` section of a recipe. TorchTitan merges it by field types: no string types."""

from dataclasses import dataclass, field
from typing import Literal

from titan_lowprec.models.dflash.attention import Impl


@dataclass
class DFlash:
    """``[dflash]``: draft training (models/README.md); read only with ``model.name = "dflash"``.

    Sizes of draft and target come from ``model.flavor`` (titan/dflash/args.py).
    """

    target_path: str = ""
    """The target's weights: a step of a checkpoint of this package (``.../checkpoint/step-200``),
    a folder with Hugging Face ``*.safetensors``, or ``random`` (for timing only). Embedding and
    head are read from it too."""

    shard_target: bool = False
    """Shard the target's layers over the data-parallel ranks (FSDP2) instead of a copy on each.
    Embedding and head stay whole on every rank."""

    features: Literal["online", "offline"] = "online"
    """Hidden states from the target in this process, or read from ``features_path``."""

    features_path: str = ""
    """Folder that tools/dflash_features.py wrote. ``offline``: rows with features, required.
    ``online``: rows of tokens (answers of the target, say) to train on instead of ``[data]``;
    empty for ``[data]``."""

    taps: list[int] = field(default_factory=list)
    """Target layers whose outputs the draft sees, counted from 0, at least 0 and below the last
    layer. Empty: as many as draft layers, spread as in the paper."""

    block_tokens: int = 16
    """Tokens of a block, the anchor included. At least 2; 16 is the paper's."""

    anchor_slots: int = 512
    """Blocks per row and step. At least 1; 512 is the paper's for rows of 3,072 tokens."""

    anchor_seed: int = 0
    """Seed of the anchors. At least 0."""

    gamma: float = 0.0
    """Decay length of the loss weights in tokens. Above 0, and must be set: the paper has 7 for
    blocks of 16, 5 for 10, 4 for 8."""

    mask_id: int = -1
    """Token that stands for what is to be drafted, a row of the target's embedding that data
    never contain. At least 0; -1 takes the tokenizer's mask token or the first unused row."""

    objective: Literal["decay", "dpace"] = "decay"
    """The paper's exponential decay, or D-PACE (arXiv:2605.18810)."""

    attention: Literal["auto", Impl] = "auto"
    """The draft's attention; ``auto`` is ``flex_bf16`` on a GPU that computes in bf16 and
    ``reference`` elsewhere. ``reference_flex_*`` are dense forms of what ``flex_bf16`` and
    ``flex_fp32_ieee`` compute in a bf16 model, for ablations on a CPU. (``[attention]`` is the
    target's.)"""

    acceptance_freq: int = 10
    """Optimizer steps between measurements of acceptance on the training batch, which run the
    head once more. At least 1. Validation measures it every round."""
