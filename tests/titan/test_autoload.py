"""The start-up hook acts in one kind of process and leaves every other one as it was."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchtitan.config import ConfigManager

from titan_lowprec import _autoload

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OURS = str(RECIPES / "llama_tiny_mxfp8.toml")
RUN = ["python", "-m", "torchtitan.train"]


@pytest.fixture
def process(monkeypatch):
    """Pretend to be a process with the given command line; return what the hook left of it."""

    def run(orig_argv, args, switch=None):
        monkeypatch.setattr(sys, "orig_argv", orig_argv)
        monkeypatch.setattr(sys, "argv", ["train.py", *args])
        monkeypatch.delenv(_autoload.SWITCH, raising=False)
        if switch is not None:
            monkeypatch.setenv(_autoload.SWITCH, switch)
        probed = []
        monkeypatch.setattr(_autoload, "assume_cpu_without_accelerator", lambda: probed.append(1))
        _autoload.install()
        return sys.argv[1:], bool(probed)

    return run


@pytest.mark.parametrize(
    ("orig_argv", "runs"),
    [
        (["python", "-m", "torchtitan.train", "--job.config", "x"], True),
        (["python3.11", "-u", "-m", "torchtitan.train"], True),
        (["python", "-X", "dev", "-W", "error", "-Im", "other"], False),
        (["python", "-X", "dev", "-W", "error", "-m", "torchtitan.train"], True),
        (["python", "/usr/bin/torchrun", "-m", "torchtitan.train"], False),
        (["python", "-m", "torch.distributed.run", "-m", "torchtitan.train"], False),
        (["python", "-c", "import torch", "-m", "torchtitan.train"], False),
        (["python", "train.py", "-m", "torchtitan.train"], False),
        (["python", "-m"], False),
        (["python"], False),
        ([], False),
    ],
)
def test_only_the_interpreter_that_runs_the_module_counts(orig_argv, runs):
    assert _autoload.runs_module(orig_argv, "torchtitan.train") is runs


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["--job.config", OURS], ["--job.config_file", OURS]),
        ([f"--job.config={OURS}"], [f"--job.config_file={OURS}"]),
        (["--job.config_file", OURS], ["--job.config_file", OURS]),
        ([f"--job.config-file={OURS}"], [f"--job.config-file={OURS}"]),
        (
            ["--training.steps", "3", "--job.config", OURS, "--optimizer.lr=1e-3"],
            ["--training.steps", "3", "--job.config_file", OURS, "--optimizer.lr=1e-3"],
        ),
    ],
)
def test_every_spelling_of_the_config_flag_reaches_the_trainer(process, given, left):
    assert process(RUN, given) == (left, True)


def test_foreign_recipe_is_left_alone(process, tmp_path):
    foreign = tmp_path / "foreign.toml"
    foreign.write_text('# not for titan_lowprec.titan\n[model]\nname = "llama3"\n')
    assert process(RUN, ["--job.config", str(foreign)]) == (["--job.config", str(foreign)], False)


def test_plugin_named_on_the_command_line_counts(process):
    args = [
        "--job.config",
        "missing.toml",
        "--job.custom_config_module=titan_lowprec.titan.register",
    ]
    assert process(RUN, args) == (["--job.config_file", *args[1:]], True)


@pytest.mark.parametrize("flag", ["--job.config {}", "--job.config={}"])
def test_recipe_that_does_not_exist_is_reported_as_such(process, tmp_path, flag):
    path = str(tmp_path / "llama_tiny_mxpf8.toml")
    left, assumes_cpu = process(RUN, flag.format(path).split(" "))
    assert not assumes_cpu
    with pytest.raises(FileNotFoundError, match=r"llama_tiny_mxpf8\.toml"):
        ConfigManager().parse_args(left)


def test_switch_turns_the_hook_off(process):
    assert process(RUN, ["--job.config", OURS], switch="0") == (["--job.config", OURS], False)


def test_other_processes_are_left_alone(process):
    for orig_argv in (["python", "script.py"], ["python", "-m", "pytest"], ["torchrun"]):
        assert process(orig_argv, ["--job.config", OURS]) == (["--job.config", OURS], False)


@pytest.mark.parametrize("argv", [None, 3, [None], ["x", None], ["x", "--job.config"]])
def test_hook_never_raises(monkeypatch, argv):
    monkeypatch.setattr(sys, "orig_argv", RUN)
    monkeypatch.setattr(sys, "argv", argv)
    _autoload.install()


def test_hook_costs_less_than_a_millisecond_in_another_process(monkeypatch):
    source = Path(_autoload.__file__).read_text()
    code = compile(source, "_autoload.py", "exec")
    costs_s = []
    for _ in range(5):
        begin = time.perf_counter()
        namespace = {"__name__": "titan_lowprec._autoload"}
        exec(code, namespace)
        namespace["install"]()
        costs_s.append(time.perf_counter() - begin)
    assert min(costs_s) < 1e-3


def test_hook_imports_sys_and_os_only():
    code = (
        "import os, sys; before = set(sys.modules); import titan_lowprec._autoload as hook;"
        "hook.install(); print(sorted(set(sys.modules) - before))"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        cwd=RECIPES.parent,
        check=True,
    )
    assert result.stdout.strip() == "['titan_lowprec', 'titan_lowprec._autoload']"


def test_device_probe_answers_cpu_only_for_none(monkeypatch):
    import torch

    answers = iter([None, "cuda"])
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: next(answers))
    _autoload.assume_cpu_without_accelerator()
    once = torch._utils._get_available_device_type
    _autoload.assume_cpu_without_accelerator()
    assert torch._utils._get_available_device_type is once
    assert [once(), once()] == ["cpu", "cuda"]
