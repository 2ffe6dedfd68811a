"""Matrix files and stand-in runs, so that logic is tested without training."""

import json
import os
import signal
import sys
import threading
import time
from copy import deepcopy
from pathlib import Path

import pytest

from titan_lowprec.experiments.matrix import read_matrix
from titan_lowprec.experiments.resolution import resolve_runs
from titan_lowprec.experiments.run_state import State, last_step, save_runs, write_state
from titan_lowprec.experiments.runner import Slot, Sweep

DEFAULTS = {
    "job": {"dump_folder": "", "description": "", "custom_config_module": ""},
    "attention": {"recipe": "mxfp8", "scales": "token_block", "weight_exponent": 8},
    "data": {"seed": 0, "cache_dir": "", "packer": "best_fit"},
    "training": {"steps": 5},
    "debug": {"seed": 0},
    "metrics": {"run_name": ""},
}
BASE = '[job]\ndump_folder = "x"\n\n[attention]\nrecipe = "bf16"\n\n[training]\nsteps = 5\n'
HEAD = """
[matrix]
base = "base.toml"
baseline = "recipe=bf16"
acceptable_difference = 0.05
metric = "train"
seeds = [0, 1]
data_order = "per_seed"
"""
AXES = '[axes]\n"attention.recipe" = ["bf16", "mxfp8"]\n'
FAKE_TRAINER = """
import json, os, pathlib, signal, sys, time, tomllib
recipe = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
folder = pathlib.Path(recipe["job"]["dump_folder"])
behaviour = {behaviour!r}.get(folder.parent.name, "")
saved = folder / "checkpoint"
(folder / "pid").write_text(str(os.getpid()))
first = int(saved.read_text()) if saved.exists() else 0
def stop(*_):
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
def loss_of(recipe, step):
    arm = len(recipe["attention"]["recipe"]) + len(recipe["attention"]["scales"]) / 7
    return arm / step + 0.1 * recipe["debug"]["seed"] * (arm % 1)
if first:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(dict(kind="resume", step=first, attempt=2)) + "\\n")
for step in range(first + 1, recipe["training"]["steps"] + 1):
    if behaviour == "crash" and step == 3:
        raise RuntimeError("loss became a cabbage")
    line = dict(kind="train", step=step, loss=loss_of(recipe, step), valid_tokens=100)
    line |= dict(valid_tokens_seen=100 * step, valid_tokens_per_s=1.0, fingerprint=str(step))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
    (folder / "saving").write_text(str(step))
    (folder / "saving").replace(saved)  # a signal in between leaves the last checkpoint whole
    if step == {{"hang": 2, "hang late": 4}}.get(behaviour):
        time.sleep(600)
"""


def complete(config):
    """A strict resolver over ``DEFAULTS``."""
    result = deepcopy(DEFAULTS)
    for section, values in config.items():
        for key, value in values.items():
            if key not in result.get(section, {}):
                raise ValueError(f"{section}.{key} must be a key, got an unknown one")
            result[section][key] = value
    return result


class Workshop:
    """A folder with a base recipe in which matrices are written, resolved and run."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "base.toml").write_text(BASE)

    def matrix(self, text=HEAD + AXES, name="sweep"):
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return read_matrix(path)

    def resolve(self, text=HEAD + AXES):
        return resolve_runs(self.matrix(text), output=self.folder / "out", resolve=complete)

    def saved(self, text=HEAD + AXES):
        runs = self.resolve(text)
        save_runs(runs, self.folder / "out" / "sweep")
        return runs

    def trainer(self, behaviour):
        """The stand-in trainer, with arms that misbehave."""
        script = self.folder / "trainer.py"
        script.write_text(FAKE_TRAINER.format(behaviour=behaviour))
        return script

    def sweep(self, runs, *, slots=1, stop=None, behaviour=None, grace_s=10.0, retry_failed=True):
        """Run with the stand-in trainer; returns whether all finished, and what was shown."""
        script = self.trainer(behaviour or {})
        shown = []
        sweep = Sweep(
            runs,
            [Slot(f"CPU {i}", {}) for i in range(slots)],
            processes=1,
            name="sweep",
            command=lambda recipe, processes: [sys.executable, "-S", str(script), str(recipe)],
            retry_failed=retry_failed,
            show=shown.append,
            grace_s=grace_s,
        )
        good = sweep.run(stop=stop or threading.Event(), poll_s=0.02, show_s=0.05)
        return good, shown

    def record(self, run, losses, *, status="finished", tokens=100, reason="", fingerprint="a"):
        """Write the files of a run that trained with these losses."""
        lines = [
            {
                "kind": "train",
                "step": step,
                "loss": loss,
                "valid_tokens": tokens,
                "valid_tokens_seen": step * tokens,
                "valid_tokens_per_s": 10.0,
                "fingerprint": f"{fingerprint}{step}",
            }
            for step, loss in enumerate(losses, start=1)
        ]
        run.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.folder / "metrics.jsonl").write_text(text)
        write_state(run, State(status, run.hash, reason=reason))


@pytest.fixture
def workshop(tmp_path):
    return Workshop(Path(tmp_path))


def stop_at_step(stop, run, step):
    """Set the event as soon as a run has reached a step."""
    while last_step(run.folder) < step:
        time.sleep(0.01)
    stop.set()


def kill_at_step(run, step):
    """Kill the run's process with SIGKILL as soon as it has reached a step."""
    while last_step(run.folder) < step:
        time.sleep(0.01)
    os.kill(int((run.folder / "pid").read_text()), signal.SIGKILL)
