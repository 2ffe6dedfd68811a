"""Real greedy speculative decoding with a target and a draft from their checkpoints."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torchtitan.protocols.train_spec import get_train_spec
from tqdm import tqdm

from titan_lowprec.models.dflash.block_draft import BlockDraft
from titan_lowprec.models.dflash.decode import (
    Divergence,
    first_divergence,
    greedy_decode,
    speculative_decode,
)
from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.shapes import Int64, Tensor
from titan_lowprec.titan.check_config import check_config
from titan_lowprec.titan.dataloader import validation_batches_of
from titan_lowprec.titan.dflash.args import DraftModelArgs
from titan_lowprec.titan.dflash.cache import CachedTarget
from titan_lowprec.titan.dflash.state_dict import DraftStateDictAdapter
from titan_lowprec.titan.dflash.target import FrozenTarget, build_target
from titan_lowprec.titan.dflash.vocabulary import vocabulary_of
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.resume import checkpoint_folder


@dataclass(frozen=True)
class Prompted:
    """What decoding one prompt gave."""

    new_tokens: int
    lengths: tuple[int, ...]
    """Tokens that each verification added."""
    divergence: Divergence | None
    """Where the output left plain greedy decoding."""


@dataclass(frozen=True)
class Evaluation:
    """Sums over prompts."""

    prompts: tuple[Prompted, ...]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verification, over all verifications."""
        lengths = [n for prompted in self.prompts for n in prompted.lengths]
        return sum(lengths) / len(lengths) if lengths else float("nan")

    @property
    def distribution(self) -> dict[int, int]:
        """How often a verification added so many tokens."""
        counts = Counter(n for prompted in self.prompts for n in prompted.lengths)
        return dict(sorted(counts.items()))

    @property
    def target_calls(self) -> tuple[int, int]:
        """Calls to the target: speculative (the prompt's included), and plain."""
        speculative = sum(1 + len(prompted.lengths) for prompted in self.prompts)
        return speculative, sum(prompted.new_tokens for prompted in self.prompts)

    @property
    def divergences(self) -> list[tuple[int, Divergence]]:
        """Prompts whose output differs from plain greedy decoding."""
        found = enumerate(prompted.divergence for prompted in self.prompts)
        return [(number, d) for number, d in found if d is not None]

    def as_json(self) -> dict[str, Any]:
        """Figures for a file."""
        speculative, plain = self.target_calls
        return {
            "acceptance_length": self.acceptance_length,
            "distribution": {str(n): count for n, count in self.distribution.items()},
            "prompts": len(self.prompts),
            "new_tokens": plain,
            "target_calls": speculative,
            "target_calls_plain": plain,
            "divergences": [
                {"prompt": number, "index": d.index, "margin": d.margin}
                for number, d in self.divergences
            ],
        }

    def report(self) -> str:
        """Figures as text."""
        speculative, plain = self.target_calls
        lines = [
            f"acceptance length  {self.acceptance_length:.3f}",
            f"calls to target    {speculative} for {plain} tokens: "
            f"{100 * (1 - speculative / plain):.1f} % saved against plain greedy decoding",
            "added per call     "
            + ", ".join(f"{n}: {count}" for n, count in self.distribution.items()),
        ]
        if not self.divergences:
            lines.append(f"output             equal to plain greedy decoding, {plain} tokens")
        for number, d in self.divergences:
            lines.append(
                f"output             prompt {number} differs from token {d.index} on; margin of "
                f"greedy's token there {d.margin:.3g}"
            )
        return "\n".join(lines)


def latest_step(job_config: MergedJobConfig) -> Path:
    """The newest complete checkpoint of a job.

    Raises:
        ValueError: There is none.
    """
    folder = checkpoint_folder(job_config)
    steps = [path.parent for path in folder.glob("step-*/.metadata")]
    if not steps:
        raise ValueError(
            f"latest_step: {folder} must hold a checkpoint, got none; train the draft first, or "
            "name one with --draft"
        )
    return max(steps, key=lambda path: int(path.name.removeprefix("step-")))


def load_draft(args: DraftModelArgs, path: Path, *, device: torch.device) -> DraftModel:
    """A draft from a step of a checkpoint or from a folder in Hugging Face's layout.

    Raises:
        ValueError: The folder holds neither, or another draft.
    """
    assert args.draft is not None
    model = DraftModel(args.draft)
    state: dict[str, Any] = model.state_dict()
    try:
        if (path / ".metadata").is_file():
            load_checkpoint(state, checkpoint_id=str(path))
        else:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise ValueError("neither a checkpoint's step nor *.safetensors")
            stored = {name: t for file in files for name, t in load_file(file).items()}
            state = DraftStateDictAdapter(args, None).from_hf(stored)
        model.load_state_dict(state, strict=True)
    except Exception as error:
        raise ValueError(
            f"load_draft: {path} must hold a draft of these sizes, got: {error}; name the folder "
            "of a step or of an export, and the recipe that it was trained with"
        ) from error
    return model.to(device).eval()


def load_pair(
    job_config: MergedJobConfig, *, draft: Path | None, dtype: torch.dtype, max_positions: int
) -> tuple[FrozenTarget, DraftModel]:
    """Target and draft of a recipe, on the GPU if there is one."""
    from torchtitan.tools.utils import device_type

    check_config(job_config, device_type=device_type, world_size=1)
    flavors: Any = get_train_spec(job_config.model.name).model_args
    args: DraftModelArgs = flavors[job_config.model.flavor]
    args.update_from_config(job_config)
    device = torch.device(device_type)
    target = build_target(args, job_config, device=device, dtype=dtype, max_positions=max_positions)
    model = load_draft(args, draft or latest_step(job_config), device=device).to(dtype)
    return target, model


def validation_prompts(
    job_config: MergedJobConfig, *, prompts: int, prompt_tokens: int
) -> Iterator[Int64[Tensor, " P"]]:
    """Beginnings of validation documents that are long enough."""
    left = prompts
    for inputs, _ in validation_batches_of(job_config, rank=0, world_size=1):
        for tokens, offsets in zip(inputs["input"], inputs["cu_seqlens"], strict=True):
            for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
                if end - begin >= prompt_tokens and left > 0:
                    left -= 1
                    yield tokens[begin : begin + prompt_tokens]
        if left == 0:
            return


def evaluate(
    target: FrozenTarget,
    draft: DraftModel,
    prompts: list[Int64[Tensor, " P"]],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Evaluation:
    """Decode every prompt twice, speculatively and plainly, and compare.

    Both keep keys and values. Where the outputs part, the margin is that of the target's own
    attention to the whole sequence.
    """
    device = target.tables.embed_VE.device
    capacity = max(map(len, prompts)) + max_new_tokens + draft.args.block_tokens
    cached = CachedTarget(target, rows=1, capacity=capacity, attention="recipe")
    block_draft = BlockDraft(draft, target.tables, capacity=capacity)
    results: list[Prompted] = []
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_ids": eos_ids}
    for prompt in tqdm(prompts, desc="prompts", unit="prompt"):
        on_device = prompt.to(device)
        decoded = speculative_decode(cached, block_draft, on_device, **options)
        plain = greedy_decode(cached, on_device, **options)
        divergence = first_divergence(target.logits, plain, decoded.tokens_S)
        results.append(Prompted(len(plain) - len(prompt), decoded.lengths, divergence))
    return Evaluation(tuple(results))


def evaluate_recipe(
    job_config: MergedJobConfig,
    *,
    draft: Path | None,
    dtype: torch.dtype,
    prompts: int,
    prompt_tokens: int,
    max_new_tokens: int,
) -> Evaluation:
    """Measure a recipe's draft on beginnings of its validation documents."""
    positions = prompt_tokens + max_new_tokens + job_config.dflash.block_tokens
    target, model = load_pair(job_config, draft=draft, dtype=dtype, max_positions=max(positions, 1))
    chosen = [*validation_prompts(job_config, prompts=prompts, prompt_tokens=prompt_tokens)]
    if not chosen:
        raise ValueError(
            f"evaluate: validation documents of {prompt_tokens} tokens must exist, got none; "
            "lower --prompt-tokens, or name longer ones in data.validation_paths"
        )
    return evaluate(
        target,
        model,
        chosen,
        max_new_tokens=max_new_tokens,
        eos_ids=vocabulary_of(job_config).eos_ids,
    )
