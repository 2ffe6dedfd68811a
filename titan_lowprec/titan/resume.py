"""What must not change between a checkpoint and the run that continues it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from titan_lowprec.titan.merged_config import MergedJobConfig

IDENTITY_FILE = "identity.json"
NOT_IDENTITY = {
    "attention": {"impl"},
    "data": {"cache_dir", "validation_paths"},
    "dflash": {"shard_target", "attention", "acceptance_freq"},
    "optimizer": {"implementation"},
}
TRAINING_KEYS = ("seq_len", "max_norm", "dtype", "mixed_precision_param", "mixed_precision_reduce")


def run_identity(job_config: MergedJobConfig, *, global_batch_size: int) -> dict[str, Any]:
    """The settings that decide which numbers a run computes, as dotted keys."""
    sections = {
        name: asdict(getattr(job_config, name))
        for name in ("attention", "loss", "data", "optimizer", "lr_scheduler")
    }
    if job_config.model.name == "dflash":
        sections["dflash"] = asdict(job_config.dflash)
    schedule = sections["lr_scheduler"]
    schedule["total_steps"] = schedule["total_steps"] or job_config.training.steps
    sections["model"] = {
        key: getattr(job_config.model, key) for key in ("name", "flavor", "converters")
    }
    if job_config.model.converters:
        linear = job_config.quantize.linear
        sections["quantize.linear"] = {"float8": asdict(linear.float8), "mx": asdict(linear.mx)}
    sections["training"] = {key: getattr(job_config.training, key) for key in TRAINING_KEYS}
    sections["training"]["global_batch_size"] = global_batch_size
    return {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
        if key not in NOT_IDENTITY.get(section, set())
    }


def checkpoint_folder(job_config: MergedJobConfig) -> Path:
    """Where TorchTitan keeps this job's checkpoints."""
    return Path(job_config.job.dump_folder) / job_config.checkpoint.folder


def check_resume(job_config: MergedJobConfig, identity: dict[str, Any], *, load_step: int) -> None:
    """Refuse to continue a different run, or to start from random weights by accident.

    Args:
        job_config: The job file.
        identity: This run's settings.
        load_step: The step that will be loaded, -1 for none.

    Raises:
        ValueError: The checkpoint was made with other settings, or initial weights were asked for
            but an unusable checkpoint folder is in the way.
    """
    folder = checkpoint_folder(job_config)
    section = job_config.checkpoint
    if load_step < 0:
        wants_weights = section.initial_load_path or section.initial_load_in_hf
        if folder.exists() and wants_weights:
            raise ValueError(
                f"checkpoint: initial weights are asked for, but {folder} exists and holds no "
                "complete step, so TorchTitan would train from random weights; "
                "remove that folder or choose another job.dump_folder"
            )
        return
    path = folder / IDENTITY_FILE
    if not path.is_file():
        logger.warning(f"{path} is missing: cannot compare this recipe with the checkpoint's")
        return
    saved = json.loads(path.read_text())
    spelled = {"lr_scheduler.total_steps": "lr_scheduler.total_steps, or else training.steps"}
    changed = [
        f"{spelled.get(key, key)}: {saved.get(key)!r} -> {identity.get(key)!r}"
        for key in sorted(saved.keys() | identity.keys())
        if saved.get(key) != identity.get(key)
    ]
    if not changed:
        return
    message = f"checkpoint: {folder} was made with other settings:\n  " + "\n  ".join(changed)
    if not section.allow_changed_config:
        raise ValueError(
            f"{message}\nRestore them, choose another job.dump_folder, or pass "
            "--checkpoint.allow_changed_config"
        )
    logger.warning(f"{message}\nContinuing: checkpoint.allow_changed_config is set")


def save_identity(job_config: MergedJobConfig, identity: dict[str, Any]) -> None:
    """Write this run's settings beside its checkpoints."""
    folder = checkpoint_folder(job_config)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{IDENTITY_FILE}.tmp"
    temporary.write_text(json.dumps(identity, indent=1, sort_keys=True))
    temporary.replace(folder / IDENTITY_FILE)
