"""What the workers have computed for one request, in tokens, for those who charge for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from telemetry.request_times import RequestTimes


@dataclass
class PromptUsage:
    """What was computed of one prompt and its answers."""

    num_prompt_tokens: int
    computed: bool = False
    """The prompt was given to a worker, whatever became of it."""
    num_answer_tokens: int = 0
    """Tokens of all answers, with those that a resumed stream had before: they were computed again."""
    num_resumed_tokens: int = 0
    """Tokens that resumed streams had before and that were computed again."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that need not be computed, as their KV was there."""


@dataclass
class Usage:
    """What was computed of one request so far; choices add to it when they end."""

    prompts: list[PromptUsage] = field(default_factory=list)
    latest: RequestTimes | None = None
    """Where the time of the choice went that ended last; None before one has."""

    def of_prompt(self, num_prompt_tokens: int) -> PromptUsage:
        """Return the usage of one more prompt, of which nothing was computed yet."""
        usage = PromptUsage(num_prompt_tokens)
        self.prompts.append(usage)
        return usage

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts that were computed, and of the answers."""
        return sum(prompt.num_answer_tokens + prompt.computed * prompt.num_prompt_tokens for prompt in self.prompts)
