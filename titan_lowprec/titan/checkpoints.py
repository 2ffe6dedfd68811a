"""A run's checkpoint as a model in one process: for evaluation and export."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import state_dict_loader as dcp
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import get_train_spec

from titan_lowprec.titan.llama3.args import LowprecLlamaArgs
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.llama3.state_dict import LowprecLlamaStateDictAdapter
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.run_record import RUN_FOLDER
from titan_lowprec.titan.validate import load_recipe

MODEL_NAME = "llama3_lowprec"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """One checkpoint of a run."""

    folder: Path
    """The run's dump folder."""
    config: MergedJobConfig
    """As the run resolved it."""
    step: int
    weights: Path
    """Folder of this step's weights, in TorchTitan's or in Hugging Face's format."""

    @property
    def name(self) -> str:
        """The last two parts of the folder, which name arm and seed of a sweep."""
        parts = self.folder.resolve().parts
        return "/".join(parts[-2:] if parts[-1].startswith("seed") else parts[-1:])


def open_run(folder: Path, *, step: int | None = None) -> SavedRun:
    """Find a checkpoint of a run.

    Args:
        folder: The run's dump folder.
        step: Optimizer step; ``None`` is the newest checkpoint.

    Raises:
        ValueError: The folder is no run, has no such checkpoint, or trains another model.
    """
    recipe = folder / RUN_FOLDER / "config.toml"
    if not recipe.is_file():
        raise ValueError(f"{recipe}: must exist, is missing; name the dump folder of a run")
    config = load_recipe(str(recipe), [])
    config.job.dump_folder = str(folder)
    if config.model.name != MODEL_NAME or config.model.converters:
        got = f"{config.model.name} with converters {config.model.converters}"
        raise ValueError(
            f"{folder}: must train {MODEL_NAME} without converters, got {got}; their forward pass "
            "needs the trainer: set [validation] in the run itself"
        )
    steps = {
        int(path.name.removeprefix("step-")): path
        for path in (folder / config.checkpoint.folder).glob("step-*")
        if any(path.glob("*.safetensors")) or (path / ".metadata").is_file()
    }
    if not steps or (step is not None and step not in steps):
        raise ValueError(
            f"{folder}: must hold a checkpoint of step {step or 'any'}, got steps {sorted(steps)}; "
            "set checkpoint.enable, or name a step that exists"
        )
    chosen = max(steps) if step is None else step
    return SavedRun(folder, config, chosen, steps[chosen])


def model_args_of(run: SavedRun, *, seq_len: int = 0) -> LowprecLlamaArgs:
    """Arguments of the run's model, positions for rows of ``seq_len`` included."""
    flavors: Any = get_train_spec(run.config.model.name).model_args
    args = copy.deepcopy(flavors[run.config.model.flavor])
    args.update_from_config(run.config)
    args.max_seq_len = max(args.max_seq_len, seq_len)
    return args


def load_model(run: SavedRun, *, device: torch.device, seq_len: int = 0) -> LowprecLlama:
    """The model with the checkpoint's weights, fp32 as they are stored.

    Args:
        run: Whose weights.
        device: Where the model goes.
        seq_len: Longest row that it will see, if longer than the training's.
    """
    args = model_args_of(run, seq_len=seq_len)
    with torch.device(device):
        model = LowprecLlama(args)
    state = model.state_dict()
    if any(run.weights.glob("*.safetensors")):
        adapter = LowprecLlamaStateDictAdapter(args, None)
        exported = adapter.to_hf(state)
        dcp.load(exported, storage_reader=adapter.get_hf_storage_reader(str(run.weights)))
        model.load_state_dict(adapter.from_hf(exported))
    else:
        dcp.load(state, checkpoint_id=str(run.weights))
        model.load_state_dict(state)
    return model.eval()


def args_of(model: LowprecLlama) -> LowprecLlamaArgs:
    """The model's arguments, which TorchTitan types as its own."""
    return cast(LowprecLlamaArgs, model.model_args)


def cast_parameters(model: LowprecLlama, config: MergedJobConfig) -> None:
    """Cast to ``training.mixed_precision_param``, as FSDP does for each forward pass.

    Parameters alone: a cast of the module would drop the imaginary part of its rotary table.
    """
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
