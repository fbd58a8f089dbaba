"""The Jinja environment of chat templates: that of `transformers`, and one that traces what a client wrote.

Templates come from the model's files, which are not trusted, so they run in an immutable sandbox. It has what `transformers`
gives them (its `utils/chat_template_utils.py`): trimmed blocks, loop controls, `raise_exception`, `strftime_now`, and `tojson`
without HTML escapes. It has `{% generation %}` blocks, too, whose content is rendered and whose extent is not needed here.

Whatever makes a string out of others passes `TracingEnvironment`: filters, calls, operators, output. Methods of `Traced` know
whose characters they return. All else is done twice, with the texts and with their outlines. If the two results are of one
length, the second is the outline of the first. If not, all of the result is the client's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from router.text.traced import Traced, concat, outline_of, plain

RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template may raise on messages it was not written for."""

_RENDERED = (Macro, LoopContext, BlockReference)
"""What a template calls and what is rendered by the template itself: its output is traced already."""
_SURROUNDINGS = (Context, EvalContext, Environment)
_TRACING_FILTERS = ("replace", "tojson", "trim")
"""Filters that do nothing but call a method of `Traced`, or that are ours."""
_TEXT = (str, Traced)
_OURS = (bool, int, float, slice, Undefined, type(None))


class _Opaque(Exception):
    """Raised for a value that may hold a client's text and that has no outline."""


class _TracingCode(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Renders templates whose variables hold `Traced` strings; the result is traced too."""

    code_generator_class = _TracingCode
    concat = staticmethod(concat)
    intercepted_binops = frozenset("+%*")

    def __init__(self) -> None:
        extensions = [_GenerationBlock, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_output)
        self.filters["tojson"] = _to_json
        self.filters = {name: _traced(name, function) for name, function in self.filters.items()}
        own = {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _make_dict}
        self.globals |= {**own, "namespace": _PublicNamespace}

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls. (The names leave all others to keyword arguments.)"""
        call = functools.partial(super().call, __context)
        receiver = getattr(__obj, "__self__", None)
        if isinstance(__obj, _RENDERED) or isinstance(receiver, dict | list | tuple):
            return call(__obj, *args, **kwargs)
        if not isinstance(receiver, str | bytes):
            return _twice(functools.partial(call, __obj), args, kwargs)

        def method(text: str | bytes, *rest: Any, **named: Any) -> Any:
            return call(getattr(text, __obj.__name__), *rest, **named)

        return _twice(method, (receiver, *args), kwargs, traces=isinstance(receiver, Traced))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return what `+`, `%` or `*` gives."""
        if operator == "+" and type(left) in _TEXT and type(right) in _TEXT:
            return left + right
        return _twice(self.binop_table[operator], (left, right), {})

    @staticmethod
    def joined(values: Iterable[Any]) -> str:
        """Return the text that Jinja's operator `~` joins these values to."""
        return concat(str(_output(value)) for value in values)


def _twice(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, traces: bool = False) -> Any:
    """Return what the function gives, traced if it is a new string made of traced ones.

    `traces` says that the function's own traced strings are right, as those of `Traced` are.
    """
    args = tuple(list(each) if isinstance(each, GeneratorType) else each for each in args)
    result = function(*args, **kwargs)
    if not isinstance(result, str) or (traces and isinstance(result, Traced)):
        return result
    given = [each for each in (*args, *kwargs.values()) if not isinstance(each, _SURROUNDINGS)]
    if any(map(_is_foreign, given)) and not any(map(functools.partial(_holds, result), given)):
        return Traced(plain(result), _outline_twice(function, args, kwargs, len(result)))
    return result


def _outline_twice(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int) -> str | None:
    """What the function makes of the outlines, if it is of this length."""
    try:
        outline = function(*map(_outlined, args), **{name: _outlined(value) for name, value in kwargs.items()})
    except (_Opaque, *RENDER_ERRORS):
        return None
    return plain(outline) if isinstance(outline, str) and len(outline) == length else None


def _holds(result: str, value: Any) -> bool:
    """Whether the result is not new, but one of the strings in a value. Python has one object for equal letters."""
    if isinstance(value, str):
        return result is value and (len(result) > 1 or isinstance(result, Traced))
    if isinstance(value, Mapping):
        return any(_holds(result, each) for pair in value.items() for each in pair)
    return isinstance(value, list | tuple) and any(_holds(result, each) for each in value)


def _traced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    traces = name in _TRACING_FILTERS

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _twice(function, args, kwargs, traces=traces)

    return wrapper


def _is_foreign(value: Any) -> bool:
    """Whether a value may hold a client's text."""
    if isinstance(value, str):
        return outline_of(value) != plain(value)
    if isinstance(value, Mapping):
        return any(map(_is_foreign, value)) or any(map(_is_foreign, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_foreign, value))
    return not isinstance(value, _OURS)


def _outlined(value: Any) -> Any:
    """The value with the outlines of its strings in their place."""
    if isinstance(value, str):
        return outline_of(value)
    if isinstance(value, Mapping):
        return {_outlined(key): _outlined(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        outlined = map(_outlined, value)
        return tuple(outlined) if isinstance(value, tuple) else list(outlined)
    if isinstance(value, (*_OURS, *_SURROUNDINGS)):
        return value
    raise _Opaque


def _output(value: Any) -> Any:
    """What a template puts out: how a list or an object is written is the client's text, whatever is in it."""
    return value if isinstance(value, (str, *_OURS)) else Traced(str(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    # Local time, as in the template's original surroundings.
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # All of it counts as a client's, which saves writing it twice.
    return Traced(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` for templates: a function, whose attributes lead nowhere."""
    return dict(*args, **kwargs)


class _PublicNamespace(Namespace):
    """`namespace` for templates, without names that start with an underscore: those reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameters, so that a template may call one of its own attributes `self`.
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}: the name starts with an underscore")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; only its content matters here."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
