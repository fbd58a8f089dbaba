"""Refuses text that is surely too long before all of it is tokenized, which takes about 0.2 us a character and sometimes 5."""

from __future__ import annotations

from protocol.errors import ContextLengthError, InvalidRequestError
from router.text.tokenizer import Tokenizer

_USUAL_CHARS = 8
"""A text of more characters for each token of the context is counted piece by piece before it is tokenized as a whole."""
_PIECE_CHARS = 32 * 1024
_LEAST_CHARS = 256 * 1024


class TextBounds:
    """How much text a prompt may have, for one model with a context of `max_model_len` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._most_chars = max_model_len * tokenizer.longest_token
        self._over_context = max(_LEAST_CHARS, _USUAL_CHARS * max_model_len)
        """Most characters of a text that is tokenized though it may be longer than the context."""
        self._most_tokens = max(_LEAST_CHARS, _USUAL_CHARS * max_model_len) // 4

    def check_size(self, num_chars: int, param: str, *, over_context: bool = False) -> None:
        """Raise ContextLengthError, blaming `param`, for so many characters that no context could hold them.

        `over_context` says that a text may be longer than the context: a chat that is shortened, or text whose tokens are to be
        counted. It may be 256 KiB long, or eight characters for each token of the context. Raises InvalidRequestError beyond.
        """
        if not over_context and num_chars > self._most_chars:
            raise self._too_long(param, f"{num_chars} characters")
        if over_context and num_chars > self._over_context:
            raise InvalidRequestError(
                f"`{param}` must be shorter: at most {self._over_context} characters are tokenized here; got {num_chars}",
                param=param,
            )

    def check(self, text: str, param: str, *, over_context: bool = False) -> None:
        """Raise as `check_size` does, and for text that has surely more tokens than the context.

        Cut into pieces, a text has other tokens and a few more, so twice as many as the context are counted.
        """
        self.check_size(len(text), param, over_context=over_context)
        if over_context or len(text) <= _USUAL_CHARS * self._max_model_len:
            return
        num_tokens = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            num_tokens += len(self._tokenizer.encode(text[begin : begin + _PIECE_CHARS], param=param))
            if num_tokens > 2 * self._max_model_len:
                raise self._too_long(param, f"more than {self._max_model_len} tokens")

    def check_ids(self, num_tokens: int, param: str, *, over_context: bool = False) -> None:
        """Raise ContextLengthError for more token ids than the context has room for, an answer of one token included.

        With `over_context` raise InvalidRequestError for more than a quarter as many as `check_size` allows characters.
        """
        if not over_context and num_tokens >= self._max_model_len:
            raise self._too_long(param, f"{num_tokens} tokens")
        if over_context and num_tokens > self._most_tokens:
            raise InvalidRequestError(
                f"`{param}` must have at most {self._most_tokens} token ids; got {num_tokens}", param=param
            )

    def _too_long(self, param: str, found: str) -> ContextLengthError:
        problem = f"the model's context is {self._max_model_len} tokens, but `{param}` alone has {found}"
        return ContextLengthError(f"{problem}, which leaves no room for an answer", param=param)
