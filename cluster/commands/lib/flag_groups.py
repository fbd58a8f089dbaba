"""Parameters of a command that stand for several flags.

    @dataclass(frozen=True)
    class BenchOptions:
        seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0

    @expand_flags
    def bench(options: BenchOptions) -> None: ...

Typer sees a function with one parameter for each field, in the order of the fields; `bench` gets the record. So a new flag is
one line: the field, with its type, its help and its default.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class FlagGroup(Protocol):
    """Several flags that become one argument of a command."""

    def parameters(self) -> Sequence[inspect.Parameter]:
        """One parameter for each flag, annotated as Typer reads them."""

    def collect(self, given: Mapping[str, Any]) -> Any:
        """The argument of the command, made of the flags' values by name. Raises TandemError for values that don't fit."""


class RecordFlags:
    """The fields of a dataclass, each of them a flag. Every field needs a default and, in its annotation, a `typer.Option`."""

    def __init__(self, record: type[Any]) -> None:
        self._record = record

    def parameters(self) -> list[inspect.Parameter]:
        """One parameter for each field, annotated as Typer reads them."""
        hints = typing.get_type_hints(self._record, include_extras=True)
        return [flag(field.name, hints[field.name], field.default) for field in dataclasses.fields(self._record)]

    def collect(self, given: Mapping[str, Any]) -> Any:
        """The record with these values. Raises whatever its own checks raise."""
        return self._record(**given)


def flag(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """The parameter of a function that Typer makes a flag of."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def expand_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer should see it.

    A parameter whose type is a dataclass is replaced by flags for its fields, and a parameter that is annotated with a
    FlagGroup by the flags of this group. All others stay as they are.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[FlagGroup, Sequence[inspect.Parameter]]] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = _group(hints[name])
        if group is None:
            shown.append(flag(name, hints[name], parameter.default))
        else:
            groups[name] = group, group.parameters()
            shown += groups[name][1]

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        collected = {
            name: group.collect({parameter.name: given.pop(parameter.name) for parameter in parameters})
            for name, (group, parameters) in groups.items()
        }
        command(**given, **collected)

    expanded.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return expanded


def _group(annotation: Any) -> FlagGroup | None:
    if typing.get_origin(annotation) is typing.Annotated:
        return next((each for each in typing.get_args(annotation)[1:] if hasattr(each, "collect")), None)
    return RecordFlags(annotation) if isinstance(annotation, type) and dataclasses.is_dataclass(annotation) else None
