"""The fields that hold an answer to a form: OpenAI's `response_format`, and `guided_json` and its kin as vLLM spells them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic_core import from_json

from protocol.errors import InvalidRequestError
from router.api.body import Body, Neutral
from router.api.structured import ResponseFormat
from router.text.grammar import ANY_OBJECT, AnswerRule, choice_rule, json_answer, lark_rule, regex_rule

MAX_CHOICES_OFFERED = 1024
MAX_PATTERN = 64 * 1024

Schema = Annotated[str, Field(max_length=4 * MAX_PATTERN)] | dict[str, Any]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN)]
Options = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=MAX_CHOICES_OFFERED)
]
_SCHEMA = "a JSON Schema, as an object or as a string"
_REGEX = f"a regular expression of up to {MAX_PATTERN} characters"
_CHOICE = f"a list of up to {MAX_CHOICES_OFFERED} non-empty strings"
_GRAMMAR = f"a grammar of up to {MAX_PATTERN} characters, in the notation of Lark"


class StructuredOutputs(Body):
    """The form of an answer, in vLLM's newer way: one of these fields says it."""

    neutral: ClassVar[Neutral] = {
        "disable_fallback": (False, True),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json_: Schema | None = Field(default=None, alias="json", description=_SCHEMA)
    regex: Pattern | None = Field(default=None, description=_REGEX)
    choice: Options | None = Field(default=None, description=_CHOICE)
    grammar: Pattern | None = Field(default=None, description=_GRAMMAR)
    json_object: bool = Field(default=False, description="true or false; true for any JSON object")


_KINDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields of which a body may have one."""


FORMS = ("response_format", *_KINDS)
"""Fields that give an answer a form."""


class GuidedBody(Body):
    """The fields about an answer's form, of which a body may use one."""

    response_format: ResponseFormat | None = Field(
        default=None, description="an object with type text, json_object or json_schema"
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="an object with one of json, regex, choice, grammar and json_object"
    )
    guided_json: Schema | None = Field(default=None, description=_SCHEMA)
    guided_regex: Pattern | None = Field(default=None, description=_REGEX)
    guided_choice: Options | None = Field(default=None, description=_CHOICE)
    guided_grammar: Pattern | None = Field(default=None, description=_GRAMMAR)

    def answer_rule(self) -> AnswerRule | None:
        """Return the rule that the answer has to follow; None if it is free.

        Raises InvalidRequestError for several rules, and for JSON that is none.
        """
        rules = [
            rule for rule in (self._from_format(), self._from_structured_outputs(), *self._from_guided()) if rule is not None
        ]
        if len(rules) > 1:
            raise _both(rules[0].param, rules[1].param)
        return rules[0] if rules else None

    def check_together(self) -> None:
        """Raise InvalidRequestError for fields that don't go together."""
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise _both(given[0], given[1])
        if self.response_format is not None:
            self.response_format.check_together()

    def _from_format(self) -> AnswerRule | None:
        wanted = self.response_format
        schema = None if wanted is None else wanted.schema_wanted
        return None if wanted is None or schema is None else json_answer(schema, wanted.param, lenient=wanted.lenient)

    def _from_structured_outputs(self) -> AnswerRule | None:
        wanted, name = self.structured_outputs, "structured_outputs"
        if wanted is None:
            return None
        rules = _rules(f"{name}.", wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
        if wanted.json_object:
            rules.append(json_answer(ANY_OBJECT, f"{name}.json_object"))
        if len(rules) != 1:
            problem = f"`{name}` must have exactly one of json, regex, choice, grammar and json_object; got {len(rules)}"
            raise InvalidRequestError(problem, param=name)
        return rules[0]

    def _from_guided(self) -> list[AnswerRule]:
        return _rules("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)


def _both(one: str, other: str) -> InvalidRequestError:
    problem = f"`{one}` and `{other}` both say what form the answer has; give only one of them"
    return InvalidRequestError(problem, param=other)


def _rules(
    prefix: str, schema: str | dict[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[AnswerRule]:
    rules = []
    if schema is not None:
        rules.append(json_answer(_schema(schema, f"{prefix}json"), f"{prefix}json"))
    if regex is not None:
        rules.append(regex_rule(regex, f"{prefix}regex"))
    if choice is not None:
        rules.append(choice_rule(choice, f"{prefix}choice"))
    if grammar is not None:
        rules.append(lark_rule(grammar, f"{prefix}grammar"))
    return rules


def _schema(given: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = from_json(given, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"`{param}` must be {_SCHEMA}; it is not valid JSON: {error}", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"`{param}` must be {_SCHEMA}; it holds no object", param=param)
    return schema
