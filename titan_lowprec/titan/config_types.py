"""Problems of a job configuration, and the types of its values.

TorchTitan 0.2.2 does not check the types of TOML values.
"""

import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration."""

    key: str
    """Dotted key, as in ``training.steps``."""
    needs: str
    """What is required, to be read after "must"."""
    value: Any
    remedy: str
    """What to do, an imperative."""

    def __str__(self) -> str:
        return f"{self.key}: must {self.needs}, got {self.value!r}; {self.remedy}"


MODEL = ("model.name", "model.flavor")
DEGREES = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    "parallelism.expert_tensor_parallel_degree",
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the rules look at."""

    config: Any
    device_type: str
    world_size: int
    model_args: Any
    """Arguments of the model's flavor, ``None`` if name or flavor is unknown."""

    @property
    def data_parallel_degree(self) -> int | None:
        """Ranks that read different rows, ``None`` if the degrees do not divide the ranks."""
        section = self.config.parallelism
        same_rows = section.tensor_parallel_degree * section.pipeline_parallel_degree
        same_rows *= section.context_parallel_degree
        return None if self.world_size % same_rows else self.world_size // same_rows


@dataclass(frozen=True, slots=True)
class Rule:
    """A check, and the keys that it reads: it is left out where one of them is wrong already."""

    keys: tuple[str, ...]
    check: Callable[[Job], Iterator[Problem]]


def type_problems(config: Any, prefix: str = "") -> Iterator[Problem]:
    """Compare every value of a (nested) dataclass with the annotation of its field.

    Args:
        config: An instance; its fields' types are real types, never strings.
        prefix: Dotted key of the instance, empty for the whole configuration.
    """
    for field in fields(config):
        key = f"{prefix}.{field.name}" if prefix else field.name
        value = getattr(config, field.name)
        if is_dataclass(field.type):
            if is_dataclass(value):
                yield from type_problems(value, key)
            else:
                yield Problem(key, "be a section", value, f"write [{key}] and its keys under it")
        elif not conforms(value, field.type):
            yield Problem(key, f"be {describe(field.type)}", value, _remedy(value, field.type))
        elif _lists_nothing(value, field.type):
            yield Problem(
                key,
                "not hold an empty string, which a filter would match with every name",
                value,
                "remove it, or write [] for none",
            )


def conforms(value: Any, annotation: Any) -> bool:
    """Whether a value is of the annotated type; an ``int`` may stand for a ``float``.

    ``True`` is no integer.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(conforms(value, choice) for choice in arguments)
    if origin is list:
        return isinstance(value, list) and all(conforms(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if annotation is None or annotation is types.NoneType:
        return value is None
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is annotation


def describe(annotation: Any) -> str:
    """An annotation in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(choice) for choice in arguments if choice is not types.NoneType)
    if origin is list:
        return f"a list, each item {describe(arguments[0])}"
    words = {int: "an integer", float: "a number", str: "a text in quotes", bool: "true or false"}
    return words.get(annotation, str(annotation))


def _lists_nothing(value: Any, annotation: Any) -> bool:
    return "list[str]" in str(annotation) and isinstance(value, list) and "" in value


def _remedy(value: Any, annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return "choose one of them"
    if isinstance(value, str) and not conforms("", annotation):
        if typing.get_origin(annotation) is list:
            return f'write ["{value}"]'
        return "write it without quotes"
    if isinstance(value, int | float) and conforms("", annotation):
        return "put it in quotes"
    return f"write {describe(annotation)}"
