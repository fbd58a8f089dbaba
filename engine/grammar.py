"""Constrained decoding: which tokens may come next, so that an answer follows a grammar.

    Grammars.constraint ──► Constraint   begin ──► (the model computes the step) ──► allowed ──► accept ──► begin ...
                                                        the mask is computed meanwhile, in a thread of its own

Errors name no field: a worker does not know which one of the request the grammar comes from.

A grammar is text in the dialect of Lark that llguidance reads, written by the router (`router.text.grammar`). llguidance was
chosen over xgrammar because it compiles next to nothing ahead: a schema that nobody has seen is ready in about a millisecond, a
mask in 5 to 500 us. Its limits turn a hostile schema into an error instead of a stalled worker.

JSON alone lets numbers go on for ever; after `MAX_DIGITS` in a row something else is chosen if anything else may be, but where
text is free and where a string may end: those end as other text does. So do digits in grammars without JSON.

The state is a function of the answer's tokens alone, so a stream that goes on elsewhere, or choices that share a prompt, need
nothing but these. Only the first rank of a worker samples, and only it has constraints.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from configs.facts import Model, ModelFacts, TokenizerFacts
from configs.model_files.vocabulary import token_bytes
from protocol.errors import ConfigError, InvalidRequestError
from protocol.sampling import SamplingParams

Allowed = npt.NDArray[np.bool_]
"""Whether each token is allowed, by token id."""

MAX_DIGITS = 40
"""Most digits of a JSON number in a row, where the answer may go on otherwise. JSON sets no limit, so a model that falls into a
loop within a number would never leave it; no double needs more than 17 significant digits, no 128-bit integer more than 39."""
_JSON = "%json"
"""The directive by which a grammar has a JSON Schema in it."""
_KEPT_GRAMMARS = 64
_ACCEPTED_AT_ONCE = 32
"""Tokens of an answer that a grammar is brought behind before others get a turn: each takes 1 to 100 us."""
_LIMITS = LLParserLimits(step_max_items=5_000, step_lexer_fuel=100_000, max_items_in_row=500, verbose_errors=False)
"""A tenth of what llguidance allows for a mask: schemas stay far below, and nobody's mask takes longer than a step."""


class Grammars:
    """Compiles grammars for one model, and remembers the latest. Belongs to a worker's event loop."""

    def __init__(self, model: Model) -> None:
        self._facts = model.facts
        self._tokenizer = model.tokenizer
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiling = asyncio.Lock()
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def constraint(self, grammar: str, answer: Sequence[int]) -> Constraint:
        """At the state after `answer`. Raises InvalidRequestError for a grammar that can't be used, or another's answer."""
        async with self._compiling:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = await asyncio.to_thread(self._compile, grammar)
                self._compiled[grammar] = matcher
                if len(self._compiled) > _KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
        constraint = Constraint(matcher.deep_copy(), self._facts, self._vocabulary[1], self._masks, has_json=_JSON in grammar)
        for index, token_id in enumerate(answer, start=1):
            constraint.accept(token_id)
            if index % _ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return constraint

    def close(self) -> None:
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary[0], grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar can't be used: {matcher.get_error():.300}")
        return matcher

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, _Digits]:
        """Takes a quarter of a second, which only clusters pay that need it."""
        if not self._facts.eos_token_ids:
            raise InvalidRequestError("this model has no token to end an answer with")
        known = token_bytes(self._tokenizer)[: self._facts.vocab_size]
        tokens = known + [b""] * (self._facts.vocab_size - len(known))
        wrapped = TokenizerWrapper(_Vocabulary(self._facts, self._tokenizer, tokens))
        return LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=list(self._facts.eos_token_ids)), _Digits(tokens)


class _Digits:
    """Where a vocabulary has digits (0 to 9); all by token id."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.first: Allowed = np.array([token[:1].isdigit() for token in tokens])
        self.only = [token.isdigit() for token in tokens]
        self.last = [len(token) - len(token.rstrip(b"0123456789")) for token in tokens]
        """How many a token ends with."""
        self.text = [token_id for token_id, token in enumerate(tokens) if token in (b"x", b'"')]
        """What no number of JSON has, nor follows one: where one of these may be next, text is free, or a string may end."""


class Constraint:
    """The state of a grammar after the answer so far. `begin` and `allowed` once for each token, then `accept` it."""

    def __init__(
        self, matcher: LLMatcher, facts: ModelFacts, digits: _Digits, masks: ThreadPoolExecutor, *, has_json: bool
    ) -> None:
        self._matcher = matcher
        self._vocab_size = facts.vocab_size
        self._eos = list(facts.eos_token_ids)
        self._digits = digits
        self._digits_in_row = 0
        self._has_json = has_json
        self._masks = masks
        self._mask: Future[bytes] | None = None

    def begin(self) -> None:
        """Start to compute which tokens may be next."""
        self._mask = self._masks.submit(self._matcher.compute_bitmask)

    def allowed(self, sampling: SamplingParams, num_generated: int) -> Allowed:
        """Which tokens may be next; at least one. Waits for what was begun.

        Where the answer may end, all its stop tokens are allowed, unless it is shorter than `min_tokens` and can go on.
        """
        assert self._mask is not None, "begun before"
        packed = np.frombuffer(self._mask.result(), dtype=np.uint8)
        bits: Allowed = np.unpackbits(packed, bitorder="little", count=self._vocab_size).view(np.bool_)
        if self._has_json and self._digits_in_row >= MAX_DIGITS and not bits[self._digits.text].any():
            others = bits & ~self._digits.first
            bits = others if others.any() else bits
        may_end = bool(bits[self._eos].any())
        bits[self._eos] = False
        stops = list(sampling.stop_token_ids)
        if may_end:
            bits[stops] = True
        if stops and num_generated < sampling.min_tokens:
            longer = bits.copy()
            longer[stops] = False
            bits = longer if longer.any() else bits
        if not bits.any():
            bits[self._eos] = True
        return bits

    def accept(self, token_id: int) -> None:
        """The next token of the answer. Raises InvalidRequestError if it doesn't follow the grammar."""
        self._mask = None
        self._matcher.consume_token(token_id)
        self.check()
        before = self._digits_in_row if self._digits.only[token_id] else 0
        self._digits_in_row = before + self._digits.last[token_id]

    def ahead(self, token_ids: Sequence[int]) -> list[Constraint]:
        """The states after each of these tokens, should they be chosen next: as many as the grammar lets follow each other, up
        to one that nothing can follow. They are of their own, and this one stays as it is.
        """
        states: list[Constraint] = []
        for token_id in token_ids:
            latest = states[-1] if states else self
            state = copy.copy(latest)
            state._matcher = latest._matcher.deep_copy()
            try:
                state.accept(token_id)
            except InvalidRequestError:
                break
            if state.complete:
                break
            states.append(state)
        return states

    @property
    def failed(self) -> bool:
        """There is no telling what may be next: `check` raises."""
        return bool(self._matcher.is_error())

    def check(self) -> None:
        """Raise InvalidRequestError if there is no telling what may be next: it would take more than the limits allow."""
        if self._matcher.is_error():
            raise InvalidRequestError(f"the grammar failed: {self._matcher.get_error():.300}")

    @property
    def complete(self) -> bool:
        """Whether the grammar's text is complete, so that no token can follow."""
        return bool(self._matcher.is_stopped())


class _Vocabulary:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, facts: ModelFacts, tokenizer: TokenizerFacts, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = facts.eos_token_ids[0]
        self.special_token_ids = sorted(tokenizer.special_tokens.values())

    def __call__(self, text: bytes) -> list[int]:
        # Grammars say `no_forcing`, so nobody needs to know how the model would split what they force.
        raise ConfigError("grammars must be written with no_forcing")
