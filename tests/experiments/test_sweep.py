"""The committed matrices against the real configuration, and the real program end to end."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titan_lowprec.experiments.matrix import read_matrix
from titan_lowprec.experiments.resolution import resolve_runs
from titan_lowprec.titan.job_config import Attention
from titan_lowprec.titan.specs import attention_spec

ROOT = Path(__file__).resolve().parents[2]
MATRICES = sorted((ROOT / "configs").glob("*.toml"))
LARGE = [path for path in MATRICES if path.stem.endswith("_1b")]
REAL = """
[matrix]
base = "{root}/recipes/llama_tiny_bf16.toml"
baseline = "recipe=bf16"
acceptable_difference = 0.05
metric = "train"
seeds = [0]
data_order = "per_seed"

[set]
"training.steps" = 2
"training.seq_len" = 64
"training.local_batch_size" = 2
"validation.enable" = false
"lr_scheduler.warmup_steps" = 1

[axes]
"attention.recipe" = ["bf16", "mxfp8"]
"""


def tool(name):
    """A module of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(*args, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / args[0]), *map(str, args[1:])],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        text=True,
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def resolve():
    return tool("sweep").resolver(1)


@pytest.mark.parametrize("path", MATRICES, ids=lambda path: path.stem)
def test_committed_matrix_states_its_question_command_and_hardware(path):
    text = path.read_text()
    assert re.match(r"# Question:  .*\n(#.*\n)*# Command:   .*\n(#.*\n)*# Hardware:  ", text)
    assert f"tools/sweep.py configs/{path.name}" in text
    matrix = read_matrix(path)
    assert matrix.base.is_file() and len(matrix.arms) >= 3 and len(matrix.seeds) >= 3


def test_every_question_has_a_tiny_matrix_and_one_for_gpus():
    names = {path.stem for path in MATRICES}
    tiny = {name.removesuffix("_tiny") for name in names if name.endswith("_tiny")}
    large = {name.rpartition("_")[0] for name in names if not name.endswith("_tiny")}
    assert tiny == large


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_matrix_for_gpus_names_the_reference_where_no_kernel_takes_an_arm(path, monkeypatch):
    pytest.importorskip("triton")
    from titan_lowprec.ops.attention.kernel import unsupported_reason

    monkeypatch.setattr("titan_lowprec.ops.attention.kernel.support.interpreted", lambda: True)
    reasons = []
    for arm in read_matrix(path).arms:
        config = SimpleNamespace(attention=Attention())
        for key, value in arm.overrides.items():
            section, _, name = key.partition(".")
            if section == "attention":
                setattr(config.attention, name, value)
        spec, device = attention_spec(config), torch.device("cuda")
        reasons.append(unsupported_reason(spec, head_dim=128, device=device))
    refused = any(reason is not None for reason in reasons)
    header = path.read_text().partition("[matrix]")[0]
    assert refused == ("reference (PyTorch)" in header), reasons


@pytest.mark.slow
def test_last_arm_of_each_tiny_matrix_resolves_with_defaults_written_out(resolve, tmp_path):
    for path in MATRICES:
        if "tiny" not in path.stem:
            continue
        matrix = read_matrix(path)
        if matrix.device == "cuda":  # its arms are checked below, for a GPU
            continue
        matrix = replace(matrix, arms=matrix.arms[-1:], seeds=(0,))
        (run,) = resolve_runs(matrix, output=tmp_path, resolve=resolve)
        assert run.config["attention"]["impl"] == "auto"
    assert not any(tmp_path.iterdir())


def test_key_that_the_trainer_lacks_is_refused_with_the_arm(resolve, tmp_path):
    path = tmp_path / "x.toml"
    text = REAL.format(root=ROOT)
    path.write_text(text.replace('"attention.recipe" = [', '"attention.recipes" = ['))
    matrix = read_matrix_with(path, "recipes=bf16")
    with pytest.raises(ValueError, match=r"x, arm recipes=bf16: (.|\n)*attention\.recipes"):
        resolve_runs(matrix, output=tmp_path, resolve=resolve)


@pytest.mark.slow
def test_value_that_the_trainer_refuses_is_refused_with_the_arm(resolve, tmp_path):
    path = tmp_path / "x.toml"
    text = REAL.format(root=ROOT).replace('recipe" = ["bf16", "mxfp8"]', 'tile_q" = [64, 33]')
    path.write_text(text)
    matrix = read_matrix_with(path, "tile_q=64")
    with pytest.raises(ValueError, match=r"x, arm tile_q=33: (.|\n)*attention\.tile_q"):
        resolve_runs(matrix, output=tmp_path, resolve=resolve)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_matrix_that_needs_a_gpu_finds_no_place_without_one():
    matrix = read_matrix(ROOT / "configs" / "dflash_reductions_qwen3.toml")
    options = argparse.Namespace(devices=None, jobs=1)
    with pytest.raises(ValueError, match=r"must find a GPU, got none; use --dry-run"):
        tool("sweep").slots(options, 1, device=matrix.device)
    assert len(tool("sweep").slots(options, 1, device="any")) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_places_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"--devices 0,1 must be GPUs, got none; use --jobs"):
        tool("sweep").slots(argparse.Namespace(devices="0,1", jobs=1), 1)
    with pytest.raises(ValueError, match=r"--jobs must be at least 1, got 0"):
        tool("sweep").slots(argparse.Namespace(devices=None, jobs=0), 1)


def read_matrix_with(path, baseline):
    path.write_text(path.read_text().replace('"recipe=bf16"', f'"{baseline}"'))
    return read_matrix(path)


@pytest.mark.slow
def test_ends_of_all_matrices_resolve_and_a_real_one_trains_reports_and_is_then_done(tmp_path):
    for path in MATRICES:
        matrix = read_matrix(path)
        ends = replace(matrix, arms=(matrix.arms[0], matrix.arms[-1]), seeds=(0,))
        complete = tool("sweep").resolver(matrix.processes, device=matrix.device)
        assert len(resolve_runs(ends, output=tmp_path, resolve=complete)) == 2
    matrix = tmp_path / "real.toml"
    matrix.write_text(REAL.format(root=ROOT))
    first = program("sweep.py", matrix, "--jobs", "2", cwd=tmp_path)
    assert first.returncode == 0, first.stdout
    assert "2/2 runs finished" in first.stdout
    again = program("sweep.py", matrix, cwd=tmp_path)
    assert again.returncode == 0 and "real: 2 runs, 0 to do" in again.stdout
    report = program("report.py", matrix, cwd=tmp_path)
    assert "Every arm saw the baseline's batches" in report.stdout, report.stdout
    assert re.search(
        r"\| recipe=mxfp8 \| undecided \(one seed\) \| 1/1 \| \d\.\d{4} \|", report.stdout
    )
