"""Turns a checked body into what the pipeline needs: token ids, sampling, lengths that fit. Pure; may run in a thread."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from configs.facts import Model
from protocol.errors import ContextLengthError, InvalidRequestError
from protocol.sampling import MAX_PROMPT_LOGPROBS, SamplingParams, TokenBias
from router.api.answer_form import AnswerForm, chat_form, content_form
from router.api.chat.body import ChatBody
from router.api.chat.messages import ChatMessage
from router.api.chat.template import TemplateBody
from router.api.completions.body import CompletionBody
from router.api.fields import MAX_SEED
from router.api.large.texts import TextBounds
from router.api.truncation import Truncated, truncated
from router.request.echo import Echo
from router.request.generation import Generation
from router.text.chat_template import DEFAULT_OPTIONS, ChatTemplate, TemplateOptions
from router.text.tokenizer import Tokenizer
from router.text.tool_format import Message, Tool, ToolFormat, tool_format
from router.text.traced import plain

_MAX_ID_DIGITS = 10
_MOST_ECHOED_CHARS = 2**24
"""Characters of all echoed prompts of an answer that is held and written as one; a body of 4 MiB can echo its prompt thrice."""

_TRUNCATED_ROOM = 1024
_TRUNCATED_SHARE = 8
"""A chat is truncated until an answer of 1,024 tokens fits, or of an eighth of the context, if max_tokens does not say more."""


def shown_by(template: ChatTemplate, format_: ToolFormat) -> ToolFormat:
    """Return the format with what the template can show: system messages, and several calls in an answer or only one."""

    def says(*roles: str) -> bool:
        try:
            text = template.render([{"role": role, "content": f"as {role}"} for role in roles])
        except InvalidRequestError:
            return False
        return all(f"as {role}" in text for role in roles)

    format_ = replace(format_, system=says("system", "user") or not says("user"))

    def shows(number: int) -> bool:
        function = {"name": "f", "arguments": {}}
        calls = [{"id": f"call00{index}", "type": "function", "function": function} for index in range(number)]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "0"} for call in calls]
        asked: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *results,
        ]
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
        messages, tools = format_.conversation(asked, [tool])
        try:
            template.render(messages, tools=tools)
        except InvalidRequestError:
            return False
        return True

    return replace(format_, several=shows(2) or not shows(1))


class Preparer:
    """Prepares requests for one model: it knows the model's tokenizer, its chat template and its limits."""

    def __init__(self, model: Model, tokenizer: Tokenizer, max_model_len: int) -> None:
        """`max_model_len` is the most tokens that prompt and answer may have together.

        Raises ConfigError for a chat template that is not valid.
        """
        self._facts = model.facts
        self._tokenizer = tokenizer
        self._template = ChatTemplate(model.tokenizer.chat_template, model.tokenizer)
        self._tool_format = shown_by(self._template, tool_format(model.tokenizer.chat_template))
        self._max_model_len = max_model_len
        self._bounds = TextBounds(tokenizer, max_model_len)

    def chat(self, body: ChatBody, max_context: int | None = None) -> list[Generation]:
        """Return the one generation of a chat.

        `max_context` is the most tokens that the caller's prompt and answer may have together; None for the model's own limit.
        Raises InvalidRequestError, and ContextLengthError when prompt and answer are too long.
        """
        body.check_together()
        form = chat_form(body, self._tool_format, self._facts.vocab_size)
        shared = self._shared(body, form)
        chat = self._chat_prompt(body, form.tools, max_context)
        generation = self._generation(shared, body, chat.token_ids, "messages", body.answer_tokens)
        num_dropped = None if body.truncation == "disabled" else chat.num_dropped
        return [replace(generation, continues=body.continue_final_message, num_dropped=num_dropped)]

    def _chat_prompt(self, body: ChatBody, tools: Sequence[Tool], max_context: int | None) -> Truncated:
        """The chat as it is if it fits, or if dropping turns is not allowed or does not help."""
        options = self.template_options(body)
        shortened = body.truncation != "disabled"
        token_ids = self.chat_tokens(body.messages, tools, options, over_context=shortened)
        if not shortened:
            return Truncated(token_ids, 0)
        context = self._max_model_len if max_context is None else min(self._max_model_len, max_context)
        least = body.answer_tokens or max(1, body.min_tokens)
        room = body.answer_tokens or max(least, min(_TRUNCATED_ROOM, context // _TRUNCATED_SHARE))

        def render(indices: Sequence[int]) -> list[int]:
            return self.chat_tokens([body.messages[index] for index in indices], tools, options, over_context=True)

        whole = Truncated(token_ids, 0)
        roles = [message.role for message in body.messages]
        for wanted in dict.fromkeys((room, least)):
            chat = whole if len(token_ids) + wanted <= context else truncated(roles, render, context - wanted)
            if chat is not None:
                return chat
        return whole

    def completion(self, body: CompletionBody) -> list[Generation]:
        """Return one generation for each prompt of a plain completion.

        Raises InvalidRequestError, and ContextLengthError when prompt and answer are too long.
        """
        body.check_together()
        prompts = body.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                self._bounds.check_size(len(prompt), "prompt")
            else:
                self._bounds.check_ids(len(prompt), "prompt")
        form = content_form(body, self._facts.vocab_size)
        shared = replace(self._shared(body, form), continues=True)
        generations = [self._completion(shared, body, prompt) for prompt in prompts]
        _check_echoed(body, generations)
        return generations

    def _completion(self, shared: Generation, body: CompletionBody, prompt: str | list[int]) -> Generation:
        token_ids = self._prompt_tokens(prompt)
        # An answer of no token is one token long for the workers, and dropped here.
        generation = self._generation(shared, body, token_ids, "prompt", max(1, body.answer_tokens))
        if not body.echo:
            return generation
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special=False)
        num_added = self._tokenizer.num_bos if isinstance(prompt, str) else 0
        echo = Echo(text, tuple(token_ids), alone=body.answer_tokens == 0, num_added=num_added)
        return replace(generation, sampling=replace(generation.sampling, num_prompt_logprobs=body.logprobs), echo=echo)

    def _prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.text_tokens(prompt)
        self.check_tokens(prompt, "prompt")
        return prompt

    def text_tokens(self, text: str, *, add_special_tokens: bool = True, over_context: bool = False) -> list[int]:
        """Return the token ids of a plain prompt, with BOS in front where the model's tokenizer puts one.

        Raises InvalidRequestError for text that is not Unicode, has too long a run of spaces, or is longer than a context could
        hold; with `over_context` it may be longer, up to a bound of its own.
        """
        self._bounds.check(text, "prompt", over_context=over_context)
        return self._tokenizer.encode(text, add_bos=add_special_tokens)

    def chat_tokens(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        over_context: bool = False,
    ) -> list[int]:
        """Return the token ids of a chat, spelled by the model's own template with the control tokens that it puts in.

        Control tokens that are written in messages or tools stay text.

        `tools` are in the form that chat templates know. Raises InvalidRequestError for messages that the template refuses, or
        that are longer than a context could hold; with `over_context` they may be longer, up to a bound of their own.
        """
        self._bounds.check_size(sum(message.num_chars for message in messages), "messages", over_context=over_context)
        spelled = [message.for_template(f"messages.{index}") for index, message in enumerate(messages)]
        conversation, own_tools = self._tool_format.conversation(spelled, tools)
        text = self._template.render(conversation, tools=own_tools, options=options)
        self._bounds.check(plain(text), "messages", over_context=over_context)
        return self._tokenizer.encode_traced(text, param="messages")

    def template_options(self, body: TemplateBody) -> TemplateOptions:
        """Return how the body's chat is rendered. Raises InvalidRequestError for variables that the template does not use."""
        return body.template_options(self._template.variables)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens. Raises InvalidRequestError for ids outside the vocabulary, and for too many."""
        self._bounds.check_ids(len(token_ids), "tokens", over_context=True)
        self.check_tokens(token_ids, "tokens")
        return self._tokenizer.decode(token_ids, skip_special=False)

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequestError for ids outside the vocabulary."""
        outside = [token_id for token_id in token_ids if not 0 <= token_id < self._facts.vocab_size]
        if outside:
            raise InvalidRequestError(
                f"`{param}` must hold token ids from 0 to {self._facts.vocab_size - 1}; got {outside[0]}", param=param
            )

    def _shared(self, body: ChatBody | CompletionBody, form: AnswerForm) -> Generation:
        """What all prompts of a request share, as a generation without a prompt. Seed and limit come with each prompt."""
        self.check_tokens(body.stop_token_ids, "stop_token_ids")
        own_stops = () if body.ignore_eos else self._facts.eos_token_ids
        sampling = SamplingParams(
            seed=0,
            max_tokens=1,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k >= self._facts.vocab_size else max(0, body.top_k),
            min_p=body.min_p,
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*own_stops, *body.stop_token_ids))),
            num_logprobs=body.num_logprobs,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=self._biases(body.logit_bias),
            grammar=form.grammar,
            speculative_decoding=body.speculative_decoding,
        )
        return Generation(
            prompt_token_ids=(),
            sampling=sampling,
            stops=body.stops(),
            cache_salt=body.cache_salt or "",
            prompt_cache_key=body.prompt_cache_key,
            num_choices=body.n,
            echo=None,
            tool_format=form.tool_format,
        )

    def _generation(
        self, shared: Generation, body: ChatBody | CompletionBody, token_ids: Sequence[int], param: str, wanted: int | None
    ) -> Generation:
        """The generation of one prompt: `shared` with its tokens, a seed of its own, and as long an answer as fits."""
        if not token_ids:
            raise InvalidRequestError(f"`{param}` must not be empty", param=param)
        max_tokens = self._answer_room(len(token_ids), wanted, param)
        if body.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"`min_tokens` must be an integer from 0 to max_tokens ({max_tokens}); got {body.min_tokens}",
                param="min_tokens",
            )
        seed = secrets.randbelow(MAX_SEED) if body.seed is None else body.seed
        sampling = replace(shared.sampling, seed=seed, max_tokens=max_tokens)
        return replace(shared, prompt_token_ids=tuple(token_ids), sampling=sampling)

    def _biases(self, logit_bias: Mapping[str, float]) -> tuple[TokenBias, ...]:
        """Raises InvalidRequestError for keys that are no token ids. Several spellings of one id add up."""
        for key in logit_bias:
            if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
                raise InvalidRequestError(f"`logit_bias` must have token ids as keys; got {key!r:.40}", param="logit_bias")
        self.check_tokens([int(key) for key in logit_bias], "logit_bias")
        return tuple(TokenBias(int(key), bias) for key, bias in logit_bias.items())

    def _answer_room(self, num_prompt_tokens: int, wanted: int | None, param: str) -> int:
        """How long the answer may get: what the client wants, or all that the context has left."""
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"the model's context is {self._max_model_len} tokens, but `{param}` alone has {num_prompt_tokens}, which "
                "leaves no room for an answer",
                param=param,
            )
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"the model's context is {self._max_model_len} tokens, but `{param}` has {num_prompt_tokens} and max_tokens is "
                f"{wanted}: {num_prompt_tokens + wanted} together; shorten one of them",
                param=param,
            )
        return room if wanted is None else wanted


def _check_echoed(body: CompletionBody, generations: Sequence[Generation]) -> None:
    """Raise InvalidRequestError if all choices together repeat too much of their prompts."""
    num_chars = body.n * sum(len(each.echo.text) for each in generations if each.echo is not None)
    if num_chars > _MOST_ECHOED_CHARS:
        raise InvalidRequestError(
            f"`echo` must be false: the prompts of all choices together have {num_chars} characters, and at most "
            f"{_MOST_ECHOED_CHARS} are repeated",
            param="echo",
        )
    if not body.echo or body.logprobs is None:
        return
    num_shown = body.n * sum(len(generation.prompt_token_ids) for generation in generations)
    if num_shown * (1 + body.logprobs) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"`logprobs` must be smaller: with `echo`, the {num_shown} tokens of all choices' prompts times "
            f"(logprobs + 1) may be {MAX_PROMPT_LOGPROBS}",
            param="logprobs",
        )
