"""A conversation in the terminal, over HTTP: streamed answers, several turns, Ctrl-C stops the answer and not the program."""

from __future__ import annotations

import io
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.options import DEFAULT_URL, ApiKey, Url
from protocol.errors import TandemError, UnavailableError, printable

HELP = "/exit leaves, /clear forgets the conversation, /help says this. Ctrl-C stops an answer."


def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="The cluster's own if not given.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")] = None,
) -> None:
    """Talk to the model in the terminal."""
    _prepare_input()
    client = ApiClient(url, api_key)
    conversation = Conversation(
        model=_first_model(client) if model is None else _encodable(model),
        system=None if system is None else _encodable(system),
        max_tokens=max_tokens,
        temperature=temperature,
    )
    converse(client, conversation, Console())


def _prepare_input() -> None:
    """Have `input` edit its line, and no byte end the conversation that is none of a character in the terminal's encoding."""
    with suppress(ImportError):
        import readline  # noqa: F401  # is all that `input` needs
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def _encodable(argument: str) -> str:
    """An argument of the command line, where bytes that are no text have become halves of characters."""
    return argument.encode(errors="replace").decode()


def _first_model(client: ApiClient) -> str:
    try:
        return str(client.get("/v1/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise UnavailableError("the server lists no model; name one with --model") from None


@dataclass
class Conversation:
    """The messages so far, as the API takes them. A turn is kept only once it has an answer."""

    model: str
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def request(self, text: str) -> dict[str, Any]:
        """Return the body of a request that asks for the answer to `text`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *self.messages, {"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        optional = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return body | {name: value for name, value in optional.items() if value is not None}

    def keep(self, text: str, answer: str) -> None:
        """Add a question and its answer to the conversation."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@dataclass
class Timing:
    """Times of one answer, in seconds on the monotonic clock."""

    begun: float
    first: float | None = None
    tokens: int | None = None
    """The server's count, which comes at the end: None of an answer that was stopped or broke off."""

    def summary(self, now: float) -> str:
        """Say when the first token came and, once the server has counted them, how many came how fast. `now` is the end."""
        if self.first is None:
            return "no answer"
        first_ms = f"{(self.first - self.begun) * 1000:.0f} ms"
        if self.tokens is None:
            return f"first token after {first_ms}"
        rate = f", {(self.tokens - 1) / (now - self.first):.1f} tokens/s" if self.tokens > 1 and now > self.first else ""
        return f"{self.tokens} tokens, first after {first_ms}{rate}"


def answer_pieces(events: Iterator[dict[str, Any]], timing: Timing) -> Iterator[str]:
    """Yield the text of a streamed chat completion as it comes, and note the times and the token count in `timing`.

    Raises UnavailableError for an event that is unlike OpenAI's.
    """
    for event in events:
        text, tokens = _text_and_tokens(event)
        timing.tokens = tokens or timing.tokens
        if text:
            timing.first = timing.first or time.monotonic()
            yield text


def _text_and_tokens(event: dict[str, Any]) -> tuple[str, int]:
    """What an event says of the answer, and how many tokens that has by its usage. Either may be missing."""
    try:
        texts = [choice["delta"].get("content") or "" for choice in event.get("choices") or ()]
        return "".join(texts), int((event.get("usage") or {}).get("completion_tokens", 0))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise UnavailableError(f"the answer is not as in OpenAI's API: {event!s:.100}") from None


def converse(client: ApiClient, conversation: Conversation, console: Console) -> None:
    """Read a line, ask the model, print its answer, until /exit or the end of input."""
    console.print(f"[bold]{escape(printable(conversation.model))}[/bold]. {HELP}", highlight=False, emoji=False)
    while True:
        try:
            text = input("> ").strip()  # readline has to know the prompt, and takes no markup
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]/exit leaves[/dim]")
            continue
        match text:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/clear":
                conversation.messages.clear()
                console.print("The conversation is forgotten.")
            case "/help":
                console.print(HELP, highlight=False)
            case _:
                _turn(client, conversation, text, console)


@contextmanager
def _noticed_interrupt() -> Iterator[threading.Event]:
    """Whether Ctrl-C was pressed: Python drops a KeyboardInterrupt that is raised while an object is being finalized."""
    interrupted = threading.Event()

    def on_interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, former)


def _turn(client: ApiClient, conversation: Conversation, text: str, console: Console) -> None:
    timing = Timing(time.monotonic())
    said: list[str] = []
    try:
        events = client.stream("/v1/chat/completions", conversation.request(text))
        with closing(events), _noticed_interrupt() as interrupted:
            for piece in answer_pieces(events, timing):
                if interrupted.is_set():
                    raise KeyboardInterrupt
                said.append(piece)
                console.file.write(printable(piece))  # console.print would expand tabs, and turn `:x:` into an emoji
                console.file.flush()
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    except TandemError as error:
        if said:
            console.print()  # the answer has no line feed yet
        console.print(f"[red]{escape(printable(error.message))}[/red]", highlight=False, emoji=False)
    console.print(f"\n[dim]{timing.summary(time.monotonic())}[/dim]", highlight=False)
    if said:
        conversation.keep(text, "".join(said))
