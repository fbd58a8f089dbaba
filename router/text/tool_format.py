"""How a model writes tool calls: as its chat template says or, where the template knows no tools, in Hermes' way.

Hermes (Qwen, Hermes and many others)      <tool_call>
                                           {"name": "f", "arguments": {...}}
                                           </tool_call>
Llama 3                                    {"name": "f", "parameters": {...}}

The answer's grammar holds every call to its form and its tool's schema, so that `ToolCallParser` has an easy life.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.grammar import HEAD, json_rule, literal, moved
from router.text.traced import Traced, ours, theirs

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`"""

_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_INSTRUCTIONS = (
    """You can call functions. These are their signatures, as JSON Schema:
""",
    """

To call one, write the following, and nothing after it. Several calls may follow each other.
<tool_call>
{"name": "the function's name", "arguments": {"its arguments": "by name"}}
</tool_call>""",
)
"""What is said before and after the functions, to a model whose template knows no tools."""


@dataclass(frozen=True)
class ToolWishes:
    """What a request says about its tools: which there are, which of their `names` may be called, and how."""

    tools: tuple[Tool, ...]
    names: tuple[str, ...]
    strict: frozenset[str]
    """Names of the tools whose parameters are followed to the letter, or refused."""
    required: bool
    parallel: bool


@dataclass(frozen=True)
class ToolFormat:
    """How calls are spelled: `begin`, the name as JSON, `middle`, the arguments, `end`; `separator` between two calls."""

    begin: str
    middle: str
    end: str
    separator: str
    tag: str
    """The text that tells a call from content in front of it; empty if a call can only be the whole answer."""
    native: bool
    """Whether the model's chat template knows tools itself."""
    several: bool = True
    """Whether an answer may have several calls. Some chat templates refuse a message that has more than one."""
    system: bool = True
    """Whether the chat template shows system messages. One that does not often wants user and assistant in turns, too."""
    names: tuple[str, ...] = ()
    """The functions that an answer may call, in the format of that answer."""

    def grammar(self, wishes: ToolWishes, content: str | None) -> str:
        """Return the grammar of an answer that has calls, or content where no call is required.

        `content` is the rule that the content follows; None for any text. A pattern (`/.../`) matches nothing that has the tag.
        """
        call = " | ".join(f"call_{index}" for index in range(len(wishes.names)))
        more = f"({literal(self.separator + self.tag)} ({call}))*" if wishes.parallel and self.several else ""
        calls = f"({call}) {more}"
        # Without a tag, JSON content may begin as a call does. Only rules of the same kind can then be told apart later.
        write = self._call_in_json if content is not None and not self.tag else self._call
        rules = [f"call_{index}: {write(name, wishes)}" for index, name in enumerate(wishes.names)]
        if content is not None and content.startswith("/") and self.tag:
            rules.append(f"CONTENT: {content} & {self._no_tag}")
            content = "CONTENT"
        first = f"{literal(self.tag)} {calls}" if self.tag else calls
        if wishes.required:
            rules.append(f"start: {first}")
        elif not wishes.names:
            rules.append(f"start: {content or 'TEXT'}")
        elif content is not None:
            rules.append(f"start: {content} | {first}")
        elif self.tag:
            # Lazy: what begins a call begins it here, and is never part of a longer text.
            rules += [f"start: TEXT | head {calls}", f"head[lazy]: /(.|\\n)*{_regex(self.tag)}/"]
        else:
            rules.append(f"start: TEXT | {calls}")
        if content is None and not wishes.required:
            rules.append(f"TEXT: {self._text(may_call=bool(wishes.names))}")
        return HEAD + "\n".join(rules) + "\n"

    def conversation(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], Sequence[Tool] | None]:
        """Return messages and tools as the chat template can take them; no tools if the messages spell them out.

        What is ours of a message is traced (`router.text.traced`): all else in it is the client's.
        """
        if self.native:
            return list(messages), tools or None
        spelled = self._in_turns(messages)
        if not tools:
            return spelled, None
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        before, after = _INSTRUCTIONS
        instructions = ours(before) + theirs(listed) + after
        roles = [message["role"] for message in spelled]
        if not self.system and "user" in roles:
            first = roles.index("user")
            asked = {**spelled[first], "content": instructions + "\n\n" + theirs(spelled[first]["content"])}
            return [*spelled[:first], asked, *spelled[first + 1 :]], None
        if roles[0] == "system":
            return [{**spelled[0], "content": theirs(spelled[0]["content"]) + "\n\n" + instructions}, *spelled[1:]], None
        return [{"role": "system", "content": instructions}, *spelled], None

    def _text(self, *, may_call: bool) -> str:
        if self.tag:
            return f"/(.|\\n)*/ & {self._no_tag}"
        return "/([^{](.|\\n)*)?/" if may_call else "/(.|\\n)*/"

    @property
    def _no_tag(self) -> str:
        return f"~/(.|\\n)*{_regex(self.tag.strip())}(.|\\n)*/"

    def opening(self, name: str) -> str:
        """Return what stands before the arguments of a call."""
        return self.begin + json.dumps(name) + self.middle

    def _call(self, name: str, wishes: ToolWishes) -> str:
        arguments = json_rule(_arguments(name, wishes), lenient=name not in wishes.strict)
        return f"{literal(self.opening(name).removeprefix(self.tag))} {arguments} {literal(self.end)}"

    def _call_in_json(self, name: str, wishes: ToolWishes) -> str:
        """Return the rule of a call that is a JSON object without anything around it, as one rule of JSON."""
        name_key, arguments_key = json.loads(f"{self.opening('')}0{self.end}")
        arguments = moved(_arguments(name, wishes), f"/properties/{arguments_key}")
        properties = {name_key: {"const": name}, arguments_key: arguments}
        call = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        return json_rule(call, lenient=name not in wishes.strict)

    def _in_turns(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, spelled. Results of several calls are one message where the template has user and assistant alone."""
        spelled: list[Message] = []
        latest = ""
        for message in messages:
            result = self._spelled(message)
            if not self.system and latest == message["role"] == "tool":
                result = {**result, "content": spelled.pop()["content"] + "\n" + result["content"]}
            spelled.append(result)
            latest = message["role"]
        return spelled

    def _spelled(self, message: Message) -> Message:
        """The message for a template that knows neither calls nor their results: they become text of assistant and user."""
        if message["role"] == "tool":
            return {"role": "user", "content": "<tool_response>\n" + theirs(message["content"]) + "\n</tool_response>"}
        if "tool_calls" not in message:
            return message
        functions = [call["function"] for call in message["tool_calls"]]
        calls = [self._spelled_call(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in functions]
        content = ours("\n").join([*filter(None, [theirs(message["content"])]), *calls])
        return {"role": message["role"], "content": content}

    def _spelled_call(self, name: str, arguments: str) -> Traced:
        return ours(self.begin) + theirs(json.dumps(name)) + self.middle + theirs(arguments) + self.end


def _arguments(name: str, wishes: ToolWishes) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever else its author lets them be."""
    [schema] = [tool["function"]["parameters"] for tool in wishes.tools if tool["function"]["name"] == name]
    return {**schema, "type": "object"}


def tool_format(template: str | None) -> ToolFormat:
    """Return the format that this chat template speaks of; Hermes' if it knows no tools, or if there is no template."""
    template = template or ""
    if "tools" in template and _TAG in template and "<function=" not in template:
        return _hermes(native=True)
    if "tools" in template and _TAG not in template and '"parameters":' in template:
        return ToolFormat('{"name": ', ', "parameters": ', "}", "; ", "", native=True)
    return _hermes(native=False)


def _hermes(*, native: bool) -> ToolFormat:
    begin, end = f'{_TAG}\n{{"name": ', f"}}\n{_END_TAG}"
    return ToolFormat(begin, ', "arguments": ', end, "\n", f"{_TAG}\n", native)


def _regex(text: str) -> str:
    return text.replace("\n", "\\n")
