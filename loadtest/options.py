"""What a load test is asked to do: one record, whose fields are the flags of `tandem bench`.

A new flag is one line here: a field with its type, its help and its default. The command makes flags of the fields.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from loadtest import metrics
from loadtest.arrivals import check_rate, check_time_scale
from loadtest.conversations import ConversationShape, Distribution
from loadtest.datasets import MOST_TOKENS, NAMES, TRACES, Lengths
from loadtest.http_client import stands_in_a_head
from loadtest.server import ENDPOINTS, Backend
from protocol.errors import InvalidRequestError

Dataset = Literal["random", "sharegpt", "azure", "mooncake", "text", "copy"]

_OF_CONVERSATIONS = ("per_turn_input_len", "num_system_prompts", "system_prompt_len")
"""Flags for conversations alone, beside those whose names begin with `multi_turn_`."""


@dataclass(frozen=True)
class BenchOptions:
    """The options of a load test.

    Raises InvalidRequestError, naming the flag, for values that can't work or don't go together.
    """

    base_url: Annotated[str | None, Option(envvar="TANDEM_URL", help="The server; goes before --host and --port.")] = None
    host: Annotated[str, Option(help="The server's host.")] = "127.0.0.1"
    port: Annotated[int, Option(help="The server's port.")] = 8000
    endpoint: Annotated[str | None, Option(help="Path; by default the backend's.")] = None
    backend: Annotated[Backend, Option(help="Which of OpenAI's APIs.")] = "completions"
    api_key: Annotated[str | None, Option(envvar=["TANDEM_API_KEY", "OPENAI_API_KEY"], help="Bearer key for the server.")] = (
        None
    )
    model: Annotated[str | None, Option(help="The server's first one if not given.")] = None
    dataset_name: Annotated[Dataset, Option(help="What is sent.")] = "random"
    dataset_path: Annotated[Path | None, Option(help="File of the dataset (all but random; copy may have one).")] = None
    random_input_len: Annotated[int, Option(help="Prompt tokens (random, text).")] = 1024
    random_output_len: Annotated[int, Option(help="Answer tokens (random, text, copy).")] = 128
    random_range_ratio: Annotated[float, Option(help="Lengths vary by so much, from 0 to under 1.")] = 0.0
    random_prefix_len: Annotated[int, Option(help="Tokens at the beginning that all prompts share.")] = 0
    sharegpt_output_len: Annotated[int | None, Option(help="Answer tokens, instead of the file's.")] = None
    length_scale: Annotated[float, Option(help="Divides a trace's lengths.")] = 1.0
    time_scale: Annotated[
        float | None, Option(help="Send at a trace's own times, multiplied by this (10: ten times slower).")
    ] = None
    multi_turn: Annotated[bool, Option("--multi-turn", help="Hold conversations (random, text; with --backend chat).")] = False
    multi_turn_num_turns: Annotated[int, Option(help="Questions in a conversation.")] = 3
    multi_turn_concurrency: Annotated[int | None, Option(help="Conversations at a time; others wait here.")] = None
    multi_turn_delay_ms: Annotated[float, Option(help="Think time from an answer to the next question, on average.")] = 0.0
    multi_turn_delay_kind: Annotated[Distribution, Option(help="How think times vary.")] = "fixed"
    per_turn_input_len: Annotated[
        int | None, Option(help="Tokens of each further question; as many as the first has if not given.")
    ] = None
    num_system_prompts: Annotated[int, Option(help="Different system prompts that conversations share.")] = 1
    system_prompt_len: Annotated[int, Option(help="Tokens of each system prompt; 0: there is none.")] = 0
    num_prompts: Annotated[int, Option(help="Requests, or conversations.")] = 1000
    num_warmups: Annotated[int, Option(help="Requests before the run, not measured.")] = 0
    request_rate: Annotated[
        float, Option(help="Requests, or conversations, that begin per second on average; inf sends all at once.")
    ] = math.inf
    burstiness: Annotated[float, Option(help="1: Poisson. Less: in bursts. More: evenly.")] = 1.0
    max_concurrency: Annotated[int | None, Option(help="Requests at the server at a time; others wait here.")] = None
    temperature: Annotated[float, Option(help="Of sampling; 0 takes the likeliest token.")] = 0.0
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Answers have their full length (not in OpenAI's API).")] = False
    seed: Annotated[int, Option(help="Of prompts and arrivals.")] = 0
    percentile_metrics: Annotated[str, Option(help="Of ttft, ttst, tpot, itl, e2el.")] = "ttft,ttst,tpot,itl,e2el"
    metric_percentiles: Annotated[str, Option(help="Such as 50,90,99.")] = "50,90,99"
    goodput: Annotated[list[str] | None, Option(help="Limits in ms, such as ttft:500 tpot:50.")] = None
    more_goodput: Annotated[list[str] | None, Argument(metavar="METRIC:MS", help="Further limits of --goodput.")] = None
    timeout_s: Annotated[float, Option("--timeout", help="Seconds after which a request has failed.")] = 600.0

    def __post_init__(self) -> None:
        if self.more_goodput and not self.goodput:
            raise InvalidRequestError(f"what is {self.more_goodput[0]!r:.40}? Limits go after --goodput", param="goodput")
        _ = self.wanted_metrics, self.percentiles, self.limits_ms  # which raise for what they can't read
        self._check(self.dataset_name in NAMES, f"dataset-name is one of {', '.join(NAMES)}", "dataset_name")
        needs_file = self.dataset_name not in ("random", "copy")
        self._check(
            not needs_file or self.dataset_path is not None, f"{self.dataset_name} needs --dataset-path", "dataset_path"
        )
        self._check(
            self.dataset_name != "random" or self.dataset_path is None,
            "--dataset-path is not for random prompts",
            "dataset_path",
        )
        is_trace = self.dataset_name in TRACES
        self._check(is_trace or self.time_scale is None, "--time-scale is for traces, which have times", "time_scale")
        self._check(is_trace or self.length_scale == 1.0, "--length-scale is for traces", "length_scale")
        both = self.time_scale is not None and not math.isinf(self.request_rate)
        self._check(not both, "--time-scale takes the trace's own times: leave --request-rate out", "request_rate")
        check_rate(self.request_rate, self.burstiness)
        if self.time_scale is not None:
            check_time_scale(self.time_scale)
        self._check(self.num_prompts >= 1, "num-prompts must be at least 1", "num_prompts")
        answer = self.sharegpt_output_len
        right = answer is None or 1 <= answer <= MOST_TOKENS
        self._check(right, f"sharegpt-output-len must be from 1 to {MOST_TOKENS}", "sharegpt_output_len")
        self._check(self.num_warmups >= 0, "num-warmups must be at least 0", "num_warmups")
        self._check(
            self.max_concurrency is None or self.max_concurrency >= 1, "max-concurrency must be at least 1", "max_concurrency"
        )
        self._check(self.seed >= 0, "seed must be at least 0", "seed")
        self._check(0 <= self.temperature <= 2, "temperature must be from 0 to 2", "temperature")
        self._check(self.timeout_s > 0, "timeout must be over 0", "timeout")
        is_path = self.path.startswith("/") and stands_in_a_head(self.path)
        self._check(is_path, "endpoint is a path, without blanks, such as /v1/completions", "endpoint")
        if self.multi_turn:
            self._check_conversations()
        else:
            self._check_no_conversations()

    def _check_conversations(self) -> None:
        shape = self.conversation_shape  # which raises for lengths and times that can't work
        self._check(self.backend == "chat", "--multi-turn sends messages: it needs --backend chat", "backend")
        self._check(
            self.dataset_name in ("random", "text"), "--multi-turn is for --dataset-name random and text", "dataset_name"
        )
        self._check(
            self.random_prefix_len == 0, "conversations share --system-prompt-len, not --random-prefix-len", "random_prefix_len"
        )
        room = self.multi_turn_concurrency
        self._check(room is None or room >= 1, "multi-turn-concurrency must be at least 1", "multi_turn_concurrency")
        one_turn = "needs at least two turns: --multi-turn-num-turns 2"
        has_more = self.multi_turn_num_turns > 1
        self._check(has_more or self.per_turn_input_len is None, f"--per-turn-input-len {one_turn}", "per_turn_input_len")
        self._check(has_more or shape.think_s == 0, f"--multi-turn-delay-ms {one_turn}", "multi_turn_delay_ms")
        self._check(
            shape.distribution == "fixed" or shape.think_s > 0,
            "--multi-turn-delay-kind needs a --multi-turn-delay-ms over 0",
            "multi_turn_delay_kind",
        )
        right = 0 <= self.system_prompt_len <= MOST_TOKENS
        self._check(right, f"system-prompt-len must be from 0 to {MOST_TOKENS}", "system_prompt_len")
        num = self.num_system_prompts
        self._check(
            1 <= num <= self.num_prompts,
            "num-system-prompts must be from 1 to num-prompts",
            "num_system_prompts",
        )
        self._check(
            num == 1 or self.system_prompt_len > 0, "--num-system-prompts needs --system-prompt-len", "system_prompt_len"
        )

    def _check_no_conversations(self) -> None:
        for each in fields(self):
            is_theirs = each.name.startswith("multi_turn_") or each.name in _OF_CONVERSATIONS
            if is_theirs and getattr(self, each.name) != each.default:
                flag = each.name.replace("_", "-")
                raise InvalidRequestError(f"--{flag} is for conversations: --multi-turn", param=each.name)

    @staticmethod
    def _check(right: bool, sentence: str, param: str) -> None:
        if not right:
            raise InvalidRequestError(sentence, param=param)

    @property
    def url(self) -> str:
        """The server's address, such as http://127.0.0.1:8000."""
        return self.base_url or f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def path(self) -> str:
        """The path below the server's address that requests go to."""
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def wanted_metrics(self) -> tuple[str, ...]:
        """Names of the metrics whose percentiles are wanted. Raises InvalidRequestError for unknown ones."""
        return metrics.parse_metrics(self.percentile_metrics)

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles that are wanted, from 0 to 100. Raises InvalidRequestError for what is no such number."""
        return metrics.parse_percentiles(self.metric_percentiles)

    @property
    def limits_ms(self) -> dict[str, float]:
        """The limits of goodput in milliseconds, by metric. Raises InvalidRequestError for what can't be read."""
        return metrics.parse_goodput([*(self.goodput or ()), *(self.more_goodput or ())])

    @property
    def lengths(self) -> Lengths:
        """Lengths of prompts that are made up, and of their answers. Raises InvalidRequestError for those that can't work."""
        return Lengths(
            input_len=self.random_input_len,
            output_len=self.random_output_len,
            range_ratio=self.random_range_ratio,
            prefix_len=self.random_prefix_len,
        )

    @property
    def conversation_shape(self) -> ConversationShape:
        """What all conversations have in common. Raises InvalidRequestError for what can't work."""
        later = self.random_input_len if self.per_turn_input_len is None else self.per_turn_input_len
        self._check(later >= 1, "per-turn-input-len must be at least 1", "per_turn_input_len")
        return ConversationShape(
            num_turns=self.multi_turn_num_turns,
            first=self.lengths,
            later=replace(self.lengths, input_len=later),
            think_s=self.multi_turn_delay_ms / 1000,
            distribution=self.multi_turn_delay_kind,
        )

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        """The wanted metrics and, behind a limit on concurrency, the same ones counted from the planned time of sending."""
        if self.max_concurrency is None and self.multi_turn_concurrency is None:
            return self.wanted_metrics
        planned = (f"planned_{name}" for name in self.wanted_metrics)
        return tuple(dict.fromkeys((*self.wanted_metrics, *(name for name in planned if name in metrics.METRICS))))

    def as_json(self) -> dict[str, Any]:
        """The options for a file of results, without the key; what follows from several flags stands there as one value."""
        flags = {name: _finite(value) for name, value in asdict(self).items() if name not in ("host", "port", "more_goodput")}
        return flags | {
            "base_url": self.url,
            "api_key": None,
            "endpoint": self.path,
            "dataset_path": str(self.dataset_path or ""),
            "percentile_metrics": self.wanted_metrics,
            "metric_percentiles": self.percentiles,
            "goodput": {metric: _finite(limit) for metric, limit in self.limits_ms.items()},
        }


def _finite(value: Any) -> Any:
    """The value itself, or "inf": JSON has no infinity."""
    return "inf" if value == math.inf else value
