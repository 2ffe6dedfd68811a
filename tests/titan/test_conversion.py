"""Converters that change nothing are an error; those that change something are counted."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from titan_lowprec.titan.check_config import ConfigError
from titan_lowprec.titan.conversion import check_conversion, kept_names
from titan_lowprec.titan.llama3.args import FLAVORS
from titan_lowprec.titan.llama3.model import LowprecLlama


def config(*converters):
    return SimpleNamespace(model=SimpleNamespace(converters=list(converters)))


@pytest.fixture
def model():
    with torch.device("meta"):
        return LowprecLlama(FLAVORS["tiny"])


def test_converter_that_matched_nothing_is_refused_with_its_name(model):
    with pytest.raises(ConfigError, match=r"model\.converters.*float8.*29 linear layers"):
        check_conversion(model, config("float8"))


def test_no_converter_is_fine(model):
    check_conversion(model, config())


def test_converted_layers_are_accepted(model):
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: type(module) is nn.Linear,
    )
    check_conversion(model, config("float8"))


def test_kept_layers_are_named_once_for_all_blocks(model):
    def chosen(module, name):
        return type(module) is nn.Linear and "attention.wk" not in name

    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=chosen
    )
    assert kept_names(model) == ["layers.*.attention.wk", "output"]
