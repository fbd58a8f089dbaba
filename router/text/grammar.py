"""The grammars that answers have to follow, as llguidance reads them: JSON Schema and text around it, patterns, choices.

Every grammar says `no_forcing`: what can only be said in one way is still split into tokens by the model.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import InvalidRequestError
from protocol.sampling import MAX_GRAMMAR_CHARS
from router.text.grammar_checks import problem_of
from router.text.lark import largest_token_id, sets_temperature

HEAD = '%llguidance {"no_forcing": true}\n'
MAX_FREE_KEY = 100
"""Characters of a key that the schema does not name."""
_ANY: Mapping[str, Any] = {"$ref": "#/$defs/any"}
_ANY_MAP: Mapping[str, Any] = {"type": "object", "additionalProperties": _ANY}
_ANY_KIND = [{"type": ["null", "boolean", "number", "string"]}, {"type": "array", "items": _ANY}, _ANY_MAP]
ANY_OBJECT: Mapping[str, Any] = {**_ANY_MAP, "$defs": {"any": {"anyOf": _ANY_KIND}}}
"""Any JSON object. It says of which kinds its values are, so that keys within them are bounded, too."""

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_ECHO = re.compile(r" \d+ \| .*$")
"""What llguidance says about the place in the grammar, which means nothing to clients: they have not written it."""
_FUEL, _OWN_FUEL = 1_000_000, 100_000
"""llguidance's own limit, for JSON Schemas, and that for patterns and grammars of clients: a few lines that name each other
twice took 780 ms to be refused with the former, 46 ms with the latter (AMD EPYC, 2026-11-24)."""
_FOLLOWED_SCHEMA = "a JSON Schema that can be followed"
_ESCAPED = re.compile(r"\\[\s\S]|[/\n\r]")
"""In a regular expression: what is escaped already, and what ends it in a grammar unless it is spelled otherwise."""
_SPELLED = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}
_OPTIONS = re.compile(r"%llguidance\s*(?=\{)")
"""The directive by which a grammar sets options of llguidance, a JSON object behind it."""
_FREE_KEY = rf"^[\s\S]{{0,{MAX_FREE_KEY}}}$"
_MAX_KNOWN, _MAX_SAID = 1024, 300
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spacing of Python's JSON, as most of what models have read has it. With a choice, some would write blanks for ever."""
_LENIENT = {"lenient": True, "coerce_one_of": True}
_SCHEMA = ("additionalItems", "additionalProperties", "items")
_SCHEMAS = ("anyOf", "oneOf", "prefixItems", "items")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is a schema, a list of them, or schemas by name. Others hold data, or part of a schema."""
_DATA = ("const", "enum", "default", "examples")
_ANNOTATIONS = ("description", "title", "examples", "default", "$comment")
"""Keywords that ask nothing of an answer."""
_READABLE = re.compile(
    r"""(?: [^\\(\[{]
    | \\[^0-9A-Za-z<>] | \\[uU](?![dD][89A-Fa-f])(?:\{[^{}]*\})? | \\[pPx](?:\{[^{}]*\})? | \\[AadDfnrsStvwWz]
    | \((?!\?) | \(\?(?::|P?<[A-Za-z_]|[imsxuUR-])
    | \{[0-9]+(?:,[0-9]*)?\}
    | \[\^?+(?: (?!&&|--|~~|-\\[dDpPsSwW])[^\\\[\]] | \\[^0-9A-Za-z<>] | \\[uU](?![dD][89A-Fa-f]) | \\[afnrtvx]
             | \\(?:[dDsSwW]|[pP](?:\{[^{}]*\})?+)(?!-[^\]]) )+\]
    )*+""",
    re.VERBOSE,
)
"""A regular expression without look-around, borders of words, references back and what else llguidance can't follow or takes
otherwise: empty classes, brackets within a class and braces that are not escaped, kinds of characters as ends of a range, and
halves of surrogate pairs. `*+` never tries another way: a text takes linear time."""
_NAMES_KEYS = {"properties", "patternProperties", "required", "anyOf", "oneOf", "allOf", "$ref"}
"""Keywords by which an object is more than a map: its keys are left as they are."""


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """Return the part of a grammar that matches JSON of this schema.

    `lenient`: what llguidance can't follow of the schema is left out, where it would be refused otherwise.
    """
    options = {**_SPACING, **(_LENIENT if lenient else {})}
    wanted = _without_annotations(schema)
    if lenient:
        wanted = _with_readable_patterns(wanted)
    spelled = json.dumps({**_with_short_keys(wanted), "x-guidance": options}, ensure_ascii=False)
    # Half of a surrogate pair can't be encoded. This is JSON's own escape for it.
    return f"%json {spelled.encode(errors='backslashreplace').decode()}"


def _changed_within(schema: Mapping[str, Any], change: Callable[[Any], Any], lists: Sequence[str]) -> dict[str, Any]:
    """A schema in which each schema right within it is changed. `lists`: the keywords whose value is a list of schemas."""
    result = dict(schema)
    for keyword, value in schema.items():
        if keyword in lists and isinstance(value, list):
            result[keyword] = [change(each) for each in value]
        elif keyword in _SCHEMA:
            result[keyword] = change(value)
        elif keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            result[keyword] = {name: change(each) for name, each in value.items()}
    return result


def _without_annotations(schema: Any) -> Any:
    """The schema without what it says to people, which no answer follows and which is most of a well described tool."""
    if not isinstance(schema, Mapping):
        return schema
    result = _changed_within(schema, _without_annotations, (*_SCHEMAS, "allOf"))
    return {keyword: value for keyword, value in result.items() if keyword not in _ANNOTATIONS}


def _with_readable_patterns(schema: Any) -> Any:
    """The schema without the patterns that llguidance refuses also where it leaves out what it can't follow."""
    if not isinstance(schema, Mapping):
        return schema
    result = _changed_within(schema, _with_readable_patterns, (*_SCHEMAS, "allOf"))
    if not _is_readable(result.get("pattern")):
        del result["pattern"]
    named = result.get("patternProperties")
    if isinstance(named, Mapping) and not all(map(_is_readable, named)):
        del result["patternProperties"]
        result.pop("additionalProperties", None)  # which names are others' can't be told any more
        readable = {pattern: each for pattern, each in named.items() if _is_readable(pattern)}
        result |= {"patternProperties": readable} if readable else {}
    return result


def _is_readable(pattern: Any) -> bool:
    return not isinstance(pattern, str) or _READABLE.fullmatch(pattern) is not None


def _with_short_keys(schema: Any) -> Any:
    """The schema, with at most `MAX_FREE_KEY` characters in the keys of maps: a model may write one for ever otherwise."""
    if not isinstance(schema, Mapping):
        return schema
    result = _changed_within(schema, _with_short_keys, _SCHEMAS)
    types = schema.get("type")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    if is_object and not schema.keys() & _NAMES_KEYS:
        values = result.pop("additionalProperties", True)
        result |= {"patternProperties": {_FREE_KEY: values}, "additionalProperties": False}
    return result


def moved(schema: Any, place: str) -> Any:
    """Return a schema as a part of another one, at this place in it (a JSON Pointer): what it refers to is found there."""
    if not isinstance(schema, Mapping):
        return [moved(each, place) for each in schema] if isinstance(schema, list) else schema
    if isinstance(schema.get("$id"), str) and "$ref" not in schema:
        return schema  # it has an address of its own, and is where its references begin
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$id":
            continue  # beside a reference it counts in some drafts of JSON Schema, and not in others
        if keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            result[keyword] = {name: moved(each, place) for name, each in value.items()}
        elif keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
            result[keyword] = f"#{place}{value[1:]}"
        else:
            result[keyword] = value if keyword in _DATA else moved(value, place)
    return result


def literal(text: str) -> str:
    """Return the part of a grammar that matches this very text."""
    return json.dumps(text)


@dataclass(frozen=True)
class AnswerRule:
    """What an answer has to follow, and the field of the request that says so."""

    param: str
    """The path of the field that is to blame if the rule can't be followed."""
    wanted: str
    """What the field has to be, as in "`param` must be ..."."""
    rule: str
    """The rule, as a part of a grammar. If it is `whole`, all rules of a grammar, among them `start`."""
    whole: bool = False
    fuel: int = _FUEL
    """How much work llguidance may have with the rule before it is refused."""

    def check_tokens(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if the rule is a grammar that names a token outside of a vocabulary of this size."""
        largest = largest_token_id(self.rule) if self.whole else -1
        if largest >= vocab_size:
            problem = f"`{self.param}` must name tokens by ids from 0 to {vocab_size - 1}; got {largest}"
            raise InvalidRequestError(problem, param=self.param)

    def grammar(self) -> str:
        """Return the grammar of answers that follow this rule. Raises as `check_grammar`."""
        grammar = HEAD + (self.rule if self.whole else f"start: {self.rule}\n")
        check_grammar(grammar, self.param, self.wanted, self.fuel)
        return grammar


def json_answer(schema: Mapping[str, Any], param: str, *, lenient: bool = False) -> AnswerRule:
    """Return the rule of answers that are JSON of this schema; `lenient` as in `json_rule`."""
    return AnswerRule(param, _FOLLOWED_SCHEMA, json_rule(schema, lenient=lenient))


def choice_rule(options: Sequence[str], param: str) -> AnswerRule:
    """Return the rule of answers that are one of these texts."""
    return AnswerRule(
        param, "texts that can be followed", f"({' | '.join(map(literal, dict.fromkeys(options)))})", fuel=_OWN_FUEL
    )


def regex_rule(pattern: str, param: str) -> AnswerRule:
    """Return the rule of answers that this regular expression matches from beginning to end."""
    return AnswerRule(param, "a regular expression that can be followed", f"/{_ESCAPED.sub(_escape, pattern)}/", fuel=_OWN_FUEL)


def lark_rule(grammar: str, param: str) -> AnswerRule:
    """Return the rule of answers that follow this grammar, in llguidance's dialect of Lark.

    Raises InvalidRequestError for one that is too large, that sets llguidance's option `no_forcing` otherwise than the router
    does, or a temperature, which workers have for an answer and not for a rule.
    """
    _check_size(grammar, param)
    if _forces(grammar):
        raise InvalidRequestError(f"`{param}` must not set no_forcing to false", param=param)
    if sets_temperature(grammar):
        raise InvalidRequestError(f"`{param}` must not set a rule's temperature; set that of the request", param=param)
    return AnswerRule(
        param, "a grammar that can be followed, in the notation of Lark", grammar + "\n", whole=True, fuel=_OWN_FUEL
    )


def check_grammar(grammar: str, param: str, wanted: str = _FOLLOWED_SCHEMA, fuel: int = _FUEL) -> None:
    """Raise InvalidRequestError, blaming `param`, which must be what is `wanted`, if workers could not follow this grammar.

    It may block for seconds. Raises OverloadedError if it can't be found out now.
    """
    _check_size(grammar, param)
    problem = _problem(grammar, fuel)
    if problem:
        raise InvalidRequestError(f"`{param}` must be {wanted}: {problem}", param=param)


def _check_size(grammar: str, param: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"`{param}` must be smaller: at most about {MAX_GRAMMAR_CHARS // 1024} KiB", param=param)


def _escape(found: re.Match[str]) -> str:
    return _SPELLED.get(found[0], found[0])


def _forces(grammar: str) -> bool:
    for found in _OPTIONS.finditer(grammar):
        try:
            options, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # llguidance says what is wrong with it
        if isinstance(options, dict) and options.get("no_forcing", True) is not True:
            return True
    return False


def _problem(grammar: str, fuel: int) -> str:
    """Takes some milliseconds, or a hundred for a thousand properties; clients use the same few again and again."""
    digest = hashlib.sha256(f"{fuel} {grammar}".encode(errors="surrogatepass")).digest()
    found = _KNOWN.get(digest)
    if found is None:
        message = " ".join(problem_of(grammar, fuel).split())
        found = (_ECHO.sub("", _PLACE.sub("", message))[:_MAX_SAID] or "it is not valid") if message else ""
        _KNOWN.add(digest, found)
    return found


class _KnownProblems:
    """What is wrong with the latest grammars, by digest; empty for what is good. Threads share it."""

    def __init__(self) -> None:
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> str | None:
        """Return what is wrong with a grammar; None if it is not known."""
        with self._lock:
            return self._problems.get(digest)

    def add(self, digest: bytes, problem: str) -> None:
        """Note what is wrong with a grammar, and forget the one that was noted first if there are too many."""
        with self._lock:
            self._problems[digest] = problem
            if len(self._problems) > _MAX_KNOWN:
                self._problems.popitem(last=False)


_KNOWN = _KnownProblems()
