"""A recipe of a tiny draft over a random target, in the test's own process."""

import copy
import operator
from pathlib import Path

import pytest
import torch

import titan_lowprec.titan.register  # noqa: F401
from titan_lowprec.titan.check_config import find_problems
from titan_lowprec.titan.dflash.args import FLAVORS
from titan_lowprec.titan.dflash.target import build_target
from titan_lowprec.titan.validate import load_recipe

SMALL = str(Path(__file__).with_name("small.toml"))


@pytest.fixture(scope="session")
def small():
    """The small recipe's configuration; parsing takes a second, so it is copied."""
    return load_recipe(SMALL, [])


@pytest.fixture
def parse(small, tmp_path):
    """``parse("--dflash.gamma=1", "--graph.enable")`` is the small recipe with other values."""

    def parsed(*overrides):
        config = copy.deepcopy(small)
        for override in (f"--job.dump_folder={tmp_path}", *overrides):
            key, given, value = override.removeprefix("--").partition("=")
            section, _, name = key.rpartition(".")
            section = operator.attrgetter(section)(config)
            kind = type(getattr(section, name))
            setattr(section, name, kind(value) if given else True)
        return config

    return parsed


@pytest.fixture
def problems():
    """Problems of a configuration, as text."""

    def find(config, device_type="cpu", world_size=1):
        found = find_problems(config, device_type=device_type, world_size=world_size)
        return [str(problem) for problem in found]

    return find


@pytest.fixture
def resolve():
    """Arguments of a configuration's flavor, resolved; the shared flavor is left alone."""

    def resolved(config):
        args = copy.deepcopy(FLAVORS[config.model.flavor])
        args.update_from_config(config)
        return args

    return resolved


@pytest.fixture
def make_target(resolve):
    """A configuration's target in fp32 on the CPU."""

    def make(config, max_positions=128):
        return build_target(
            resolve(config),
            config,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_positions=max_positions,
        )

    return make
