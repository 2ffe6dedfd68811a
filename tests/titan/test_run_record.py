import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tomllib

import pytest
import torch
from torchtitan.config import ConfigManager

from titan_lowprec.titan import run_record

CONFIG_MODULE = "--job.custom_config_module=titan_lowprec.titan.job_config"


def parse(*args):
    return ConfigManager().parse_args([CONFIG_MODULE, *args])


def test_the_saved_configuration_loads_as_a_recipe_with_equal_values(tmp_path):
    config = parse(
        "--training.steps=7",
        "--optimizer.lr=3e-4",
        "--attention.high_precision_layers=0,3",
        "--lr_scheduler.decay_ratio=0.2",
    )
    folder = run_record.save_run_record(config, dump_folder=str(tmp_path), world_size=2)
    assert folder == tmp_path / "run"
    again = ConfigManager().parse_args([f"--job.config_file={folder / 'config.toml'}"])
    expected = config.to_dict()
    expected["job"]["config_file"] = again.job.config_file
    assert again.to_dict() == expected


def test_unset_keys_are_left_out(tmp_path):
    config = parse()
    assert config.checkpoint.initial_load_path is None
    run_record.save_run_record(config, dump_folder=str(tmp_path), world_size=1)
    saved = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert "initial_load_path" not in saved["checkpoint"]
    assert saved["checkpoint"]["interval"] == 500


@pytest.mark.slow
def test_earlier_attempts_keep_their_numbered_files(tmp_path):
    for steps in (1, 2, 3):
        config = parse(f"--training.steps={steps}")
        run_record.save_run_record(config, dump_folder=str(tmp_path), world_size=steps)
    folder = tmp_path / "run"
    found = {
        name: tomllib.loads((folder / name).read_text())["training"]["steps"]
        for name in ("config.1.toml", "config.2.toml", "config.toml")
    }
    assert found == {"config.1.toml": 1, "config.2.toml": 2, "config.toml": 3}
    worlds = [
        json.loads((folder / name).read_text())["world_size"]
        for name in ("versions.1.json", "versions.2.json", "versions.json")
    ]
    assert worlds == [1, 2, 3]
    assert len(list(folder.iterdir())) == 6  # no temporary file is left


@pytest.mark.slow
def test_a_crash_between_the_two_files_does_not_mix_attempts(tmp_path):
    run_record.save_run_record(parse(), dump_folder=str(tmp_path), world_size=1)
    (tmp_path / "run" / "config.toml").unlink()
    run_record.save_run_record(parse(), dump_folder=str(tmp_path), world_size=2)
    run_record.save_run_record(parse(), dump_folder=str(tmp_path), world_size=3)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "versions.1.json",
        "versions.2.json",
        "config.2.toml",
        "versions.json",
        "config.toml",
    }


def test_versions_name_packages_device_and_command():
    versions = run_record.collect_versions()
    assert versions["torch"] == torch.__version__
    assert versions["torchtitan"] == "0.2.2"
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert shlex.split(versions["command"]) == sys.orig_argv
    expected = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    assert versions["device"].startswith(expected)
    json.dumps(versions)


def test_a_package_that_is_not_installed_has_no_version():
    assert run_record.installed_version("a-package-that-nobody-has") is None


@pytest.fixture
def checkout(tmp_path):
    """A git repository that tracks ``ours`` and holds an untracked ``other``."""

    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, env=environment, check=True, timeout=20
        )

    for name in ("ours", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    git("init", "-q")
    git("add", "ours")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_commit_and_dirty_flag_follow_tracked_files(checkout):
    commit, dirty = run_record.checkout_state(checkout / "ours")
    assert len(commit) == 40
    assert dirty is False
    (checkout / "ours" / "__init__.py").write_text("changed = 1\n")
    assert run_record.checkout_state(checkout / "ours") == (commit, True)


def test_a_package_inside_a_foreign_repository_has_no_commit(checkout):
    assert run_record.checkout_state(checkout / "other") == (None, None)


def test_a_package_outside_any_repository_has_no_commit(tmp_path):
    assert run_record.checkout_state(tmp_path) == (None, None)


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    saved = run_record.save_run_record(parse(), dump_folder=str(tmp_path), world_size=2)
    assert saved is None
    assert list(tmp_path.iterdir()) == []


def test_every_field_of_the_configuration_is_saved_or_unset():
    config = parse()

    def keys(value, prefix=""):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if dataclasses.is_dataclass(inner):
                yield from keys(inner, f"{prefix}{field.name}.")
            elif inner is not None:
                yield f"{prefix}{field.name}"

    def saved(value, prefix=""):
        for key, inner in value.items():
            if isinstance(inner, dict):
                yield from saved(inner, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    assert set(saved(run_record.config_as_toml(config))) == set(keys(config))
