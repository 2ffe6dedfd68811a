"""TensorBoard and wandb: mirrors of ``metrics.jsonl``, one run per job over all restarts."""

import hashlib
import netrc
import os
import sys
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from torchtitan.tools.logging import logger

from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.run_record import collect_versions


class TensorBoardTracker:
    """Event files in ``{dump_folder}/{save_tb_folder}``.

    A restart adds a file whose first event hides later steps of earlier attempts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Add the scalars and flush them."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """One wandb run per job, resumed by an id made from dump folder and run name.

    Group and tags are ``WANDB_RUN_GROUP`` and ``WANDB_RUN_TAGS``, which a sweep sets to its name
    and arm; else the model's name, and its flavor and the attention recipe.

    Online, a restart continues the run; steps that it repeats after its checkpoint are kept as
    first logged, because wandb takes no step twice. Offline, each attempt is a folder of its own
    with the same id: ``wandb sync`` them oldest first. ``metrics.jsonl`` has every step once.

    A wandb that does not start stops the job before its first step. One that fails later is said
    once, as an error, and left alone: it is a mirror, and the training and ``metrics.jsonl`` go on.

    Raises:
        RuntimeError: wandb could not start.
    """

    def __init__(self, job_config: MergedJobConfig, *, mode: str) -> None:
        section = job_config.metrics
        folder = Path(job_config.job.dump_folder).resolve()
        name = section.run_name or os.environ.get("WANDB_RUN_NAME") or folder.name
        model = job_config.model
        tags = os.environ.get("WANDB_RUN_TAGS") or f"{model.flavor},{job_config.attention.recipe}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            import wandb

            self._run = wandb.init(
                entity=os.environ.get("WANDB_TEAM"),
                project=os.environ.get("WANDB_PROJECT", "titan_lowprec"),
                name=name,
                id=os.environ.get("WANDB_RUN_ID") or run_id(folder, section.run_name),
                notes=os.environ.get("WANDB_RUN_NOTES"),
                tags=[tag.strip() for tag in tags.split(",") if tag.strip()],
                group=os.environ.get("WANDB_RUN_GROUP") or model.name,
                job_type=os.environ.get("WANDB_RUN_JOB_TYPE"),
                dir=str(folder),
                config={**job_config.to_dict(), "versions": collect_versions()},
                mode=mode,  # pyright: ignore[reportArgumentType]
                resume="allow",
            )
        except Exception as error:
            raise RuntimeError(
                f"metrics.enable_wandb: wandb must start in mode {mode}, got "
                f"{type(error).__name__}: {error}; pass --metrics.wandb_mode offline and "
                "`wandb sync` later, or --metrics.no-enable_wandb"
            ) from error
        self._stopped = False
        logger.info(f"wandb run {self._run.id} ({mode}) in {self._run.dir}")

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Send the scalars at a step."""
        if not self._stopped:
            try:
                self._run.log(scalars, step=step)
            except Exception as error:
                self._stop(f"log step {step}", error)

    def close(self) -> None:
        """Finish the run, as failed while an exception is being handled."""
        exit_code = 0 if sys.exc_info()[0] is None else 1
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            self._stop("finish its run", error)

    def _stop(self, what: str, error: Exception) -> None:
        """Say that the mirror ends here."""
        self._stopped = True
        logger.error(
            f"wandb could not {what} and gets nothing more: {type(error).__name__}: {error}; "
            "metrics.jsonl has every step"
        )


Tracker: TypeAlias = TensorBoardTracker | WandbTracker
"""Takes scalars of a step with ``log`` and writes what is left with ``close``."""


def build_trackers(job_config: MergedJobConfig) -> list[Tracker]:
    """The mirrors that ``[metrics]`` asks for; called on the one rank that logs."""
    section = job_config.metrics
    trackers: list[Tracker] = []
    if section.enable_tensorboard:
        folder = Path(job_config.job.dump_folder) / section.save_tb_folder
        trackers.append(TensorBoardTracker(folder))
    if section.enable_wandb:
        mode = resolve_wandb_mode(section.wandb_mode)
        if mode == "disabled":
            logger.info("metrics.enable_wandb has no effect: the wandb mode is disabled")
        else:
            trackers.append(WandbTracker(job_config, mode=mode))
    return trackers


def run_id(dump_folder: Path, run_name: str) -> str:
    """The id under which every attempt of a job reports to wandb."""
    text = f"{dump_folder.resolve()}\n{run_name}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolve_wandb_mode(requested: str) -> str:
    """``auto`` is wandb's own ``WANDB_MODE`` if set, else online with a key, else offline."""
    if requested != "auto":
        return requested
    return os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")


def _has_wandb_key() -> bool:
    """Whether wandb would find a key in its variable or in the netrc file that its login writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    url = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        return netrc.netrc(path).authenticators(url.hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
