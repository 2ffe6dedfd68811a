"""Downstream tasks through lm-eval (``pip install 'titan_lowprec[eval]'``).

lm-eval makes the requests and the scores. Logits come from transformers on the exported checkpoint,
or from our model under any of its attentions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_lowprec.experiments.evaluation import TaskResult
from titan_lowprec.experiments.optional import need
from titan_lowprec.shapes import Float, Int, Tensor
from titan_lowprec.titan.checkpoints import SavedRun, args_of, cast_parameters, load_model
from titan_lowprec.titan.evaluate import plan_of, set_attention
from titan_lowprec.titan.export import export_hugging_face

PAPER_TASKS = ("arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande")
TRANSFORMERS = "transformers"
"""transformers' own attention, without codes."""
LONGEST_PROMPT_TOKENS = 4096
NEEDED = {"who": "evaluate", "remedy": "pip install 'titan_lowprec[eval]'"}


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What lm-eval is asked for."""

    tasks: tuple[str, ...]
    folder: Path | None
    """Folder with further task files."""
    limit: int | None
    """Documents of each task; ``None`` is all."""


def evaluate_tasks(
    run: SavedRun, attentions: Sequence[str], *, plan: TaskPlan, device: torch.device
) -> Iterator[TaskResult]:
    """Evaluate a checkpoint on tasks, exporting it first where that was not done.

    Args:
        run: Whose weights.
        attentions: ``transformers``, ``native``, or recipes of ``[attention]``.
        plan: The tasks.
        device: Where.

    Raises:
        ValueError: lm-eval or transformers is not installed; a task is unknown, or is not made of
            log-likelihoods and not evaluated by transformers.
    """
    need("lm_eval", **NEEDED)
    exported = run.folder / "hugging_face" / f"step-{run.step}"
    if not (exported / "config.json").is_file():
        export_hugging_face(run, exported)
    for attention in attentions:
        harness = language_model(run, exported, attention, device=device)
        yield from run_tasks(harness, plan, name=f"{run.name}, {attention}")


def language_model(run: SavedRun, exported: Path, attention: str, *, device: torch.device) -> Any:
    """lm-eval's model of an exported folder; logits from ours unless transformers is asked for.

    One request at a time: no padding, so that none can share a scale block with the text.
    """
    huggingface = need("lm_eval.models.huggingface", **NEEDED).HFLM
    options = {
        "pretrained": str(exported),
        "device": str(device),
        "dtype": run.config.training.mixed_precision_param,
        "batch_size": 1,
        "add_bos_token": run.config.data.add_bos,
        "max_length": LONGEST_PROMPT_TOKENS,
    }
    if attention == TRANSFORMERS:
        return huggingface(**options)
    model = load_model(run, device=device, seq_len=LONGEST_PROMPT_TOKENS)
    cast_parameters(model, run.config)
    set_attention(model, plan_of(run.config, attention, head_dim=args_of(model).head_dim))

    class OurModel(huggingface):
        """Requests, tokenizer and scores of lm-eval, logits of our model."""

        def _model_call(self, inps: Int[Tensor, "B T"], **_: Any) -> Float[Tensor, "B T V"]:
            with torch.no_grad():
                return model(inps)

        def generate_until(self, *_: Any, **__: Any) -> Any:
            raise ValueError(
                f"evaluate: a task must be made of log-likelihoods under {attention}, got one that "
                f"generates; evaluate it under {TRANSFORMERS}"
            )

    return OurModel(**options)


def run_tasks(harness: Any, plan: TaskPlan, *, name: str) -> Iterator[TaskResult]:
    """Scores of every document, per task and metric."""
    lm_eval = need("lm_eval", **NEEDED)
    manager = need("lm_eval.tasks", **NEEDED).TaskManager(
        include_path=None if plan.folder is None else str(plan.folder)
    )
    outcome = lm_eval.simple_evaluate(
        model=harness,
        tasks=list(plan.tasks),
        task_manager=manager,
        limit=plan.limit,
        log_samples=True,
        bootstrap_iters=0,
    )
    for task, samples in outcome["samples"].items():
        yield from scores_of(name, task, samples)


def scores_of(name: str, task: str, samples: Sequence[Mapping[str, Any]]) -> Iterator[TaskResult]:
    """A task's metrics that are one number a document, in the order of the documents."""
    first = samples[0]
    chosen = [sample for sample in samples if sample["filter"] == first["filter"]]
    chosen.sort(key=lambda sample: sample["doc_id"])
    for metric in first["metrics"]:
        values = [sample[metric] for sample in chosen]
        if all(isinstance(value, int | float) for value in values):
            yield TaskResult(name, task, metric, tuple(map(float, values)))
