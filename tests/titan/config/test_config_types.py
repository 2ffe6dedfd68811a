import math
import operator
import typing
from dataclasses import fields, is_dataclass

import pytest

from titan_lowprec.titan.config_ranges import RANGES, Range
from titan_lowprec.titan.config_rules import MODEL_RULES
from titan_lowprec.titan.config_run_rules import RUN_RULES
from titan_lowprec.titan.config_types import conforms, type_problems


@pytest.mark.parametrize(
    ("value", "annotation", "good"),
    [
        (1, float, True),
        (1.0, int, False),
        (True, int, False),
        (True, float, False),
        (1, bool, False),
        (None, int | None, True),
        (None, int, False),
        ("a", typing.Literal["a", "b"], True),
        ("c", typing.Literal["a", "b"], False),
        (True, typing.Literal[1], False),
        (["a"], list[str], True),
        (["a", 1], list[str], False),
        (("a",), list[str], False),
        ([["a"], []], list[list[str]] | None, True),
        ([["a"], "b"], list[list[str]] | None, False),
        ("a", list[str] | str, True),
        (3, typing.Optional[float], True),  # noqa: UP045
        ("3", float | int, False),
    ],
)
def test_conforms(value, annotation, good):
    assert conforms(value, annotation) is good


def test_no_annotation_is_text(small):
    def annotations(config):
        for field in fields(config):
            yield field.type
            if is_dataclass(field.type):
                yield from annotations(getattr(config, field.name))

    assert not any(isinstance(annotation, str) for annotation in annotations(small))
    assert [*type_problems(small)] == []


def test_every_range_and_every_rule_names_settings_that_exist(small):
    keys = {*RANGES} | {key for rule in (*MODEL_RULES, *RUN_RULES) for key in rule.keys}
    for key in keys:
        operator.attrgetter(key)(small)


@pytest.mark.parametrize("key", RANGES)
def test_the_default_of_every_ranged_setting_is_in_its_range(small, key):
    default = operator.attrgetter(key)(type(small)())
    assert default is None or default in RANGES[key]


def test_every_number_of_our_sections_has_a_range():
    from titan_lowprec.titan.job_config import JobConfig

    ours = {
        f"{section.name}.{field.name}"
        for section in fields(JobConfig)
        for field in fields(section.type)
        if field.type in (int, float)
    }
    assert ours <= set(RANGES)


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (Range(least=0), [0, 5], [-1, math.inf, math.nan]),
        (Range(above=0), [1e-9], [0, -1]),
        (Range(least=0, below=1), [0, 0.5], [1]),
        (Range(least=32, multiple_of=32), [32, 64], [0, 33, -32]),
        (Range(least=1, also=(-1,)), [-1, 1], [0, -2]),
    ],
)
def test_ranges_at_their_edges(allowed, inside, outside):
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    for value in outside:
        assert allowed.remedy(value)
