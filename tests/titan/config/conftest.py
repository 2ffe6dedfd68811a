"""Fixtures of the configuration tests: a good configuration, ways to spoil it, what is found."""

import copy
import operator
from pathlib import Path

import pytest
from torchtitan.config import ConfigManager

import titan_lowprec.titan.register  # noqa: F401
from titan_lowprec.titan.check_config import ConfigError, check_config, find_problems

SMALL = Path(__file__).parents[1] / "small.toml"


@pytest.fixture(scope="session")
def parse():
    """``parse(*overrides, recipe=path)`` is a parsed configuration."""

    def parse(*args, recipe=SMALL):
        return ConfigManager().parse_args([f"--job.config_file={recipe}", *args])

    return parse


@pytest.fixture(scope="session")
def small(parse):
    """A configuration without problems."""
    return parse()


@pytest.fixture
def changed():
    """``changed(config, settings)`` is a copy with other values under dotted keys."""

    def changed(config, settings):
        config = copy.deepcopy(config)
        for key, value in settings.items():
            section, _, name = key.rpartition(".")
            assert hasattr(operator.attrgetter(section)(config), name), f"no setting {key}"
            setattr(operator.attrgetter(section)(config), name, value)
        return config

    return changed


@pytest.fixture
def problems():
    """``problems(config, ...)`` are the problems found."""

    def problems(config, *, device_type="cpu", world_size=1):
        return [*find_problems(config, device_type=device_type, world_size=world_size)]

    return problems


@pytest.fixture
def message():
    """``message(config, ...)`` is the text of the refusal."""

    def message(config, **options):
        options = {"device_type": "cpu", "world_size": 1} | options
        with pytest.raises(ConfigError) as caught:
            check_config(config, **options)
        return str(caught.value)

    return message
