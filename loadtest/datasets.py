"""What a load test sends: prompts, lengths of answers and, from a trace, arrival times. Pure but for reading the files.

Traces have lengths and no text, so prompts are filled up. `length_scale` divides their lengths, for machines that are smaller
than those that they were taken on. Public sources: Azure's CSV files are AzurePublicDataset's LLM inference traces of 2023
(Patel et al., Splitwise, ISCA 2024); Mooncake's JSONL files are kvcache-ai/Mooncake's (FAST 2025); ShareGPT's JSON is a list
of objects with `conversations`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.fillers import Draw, Filler, Prompt, Unit
from protocol.errors import InvalidRequestError

TRACES = ("azure", "mooncake")
NAMES = ("random", "sharegpt", *TRACES, "text", "copy")

_BLOCK_TOKENS = 512
"""Tokens in a block of Mooncake's traces."""
MOST_TOKENS = 100_000_000
"""Longest prompt or answer: prompts are made in memory."""
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Sample:
    """One request to send: its prompt, and the length of its answer."""

    prompt: Prompt
    prompt_len: int
    """Length of the prompt in the filler's units."""
    output_len: int
    arrival_s: float | None = None
    """Seconds from the beginning of the trace to this request; None without a trace."""


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace: when it came, and how long it and its answer were."""

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    """A hash for each block of the prompt; empty if the trace has none."""


@dataclass(frozen=True)
class Lengths:
    """The lengths of prompts and answers that are made up.

    With `range_ratio` r they are drawn evenly from (1 - r) to (1 + r) times the length, as in vLLM.
    """

    input_len: int
    output_len: int
    range_ratio: float
    prefix_len: int
    """Units that all prompts begin with, besides `input_len`."""

    def __post_init__(self) -> None:
        if self.input_len < 0 or self.prefix_len < 0 or self.input_len + self.prefix_len < 1:
            raise InvalidRequestError("prompts need a length of at least 1", param="random_input_len")
        if self.output_len < 1:
            raise InvalidRequestError("answers need a length of at least 1", param="random_output_len")
        if max(self.input_len, self.prefix_len) > MOST_TOKENS:
            raise InvalidRequestError(f"prompts have at most {MOST_TOKENS} tokens", param="random_input_len")
        if self.output_len > MOST_TOKENS:
            raise InvalidRequestError(f"answers have at most {MOST_TOKENS} tokens", param="random_output_len")
        if not 0 <= self.range_ratio < 1:
            raise InvalidRequestError("random-range-ratio must be at least 0 and under 1", param="random_range_ratio")

    def draw(self, num: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Draw the lengths of this many prompts, without the prefix, each with the length of its answer."""
        inputs = _drawn(self.input_len, self.range_ratio, num, rng, 0 if self.prefix_len else 1)
        return list(zip(inputs, _drawn(self.output_len, self.range_ratio, num, rng, 1), strict=True))


def random_samples(num: int, lengths: Lengths, filler: Filler, rng: np.random.Generator) -> list[Sample]:
    """Make prompts of random units, all with the same prefix."""
    prefix = filler.draw(rng, lengths.prefix_len)
    return [_sample(filler, [*prefix, *filler.draw(rng, inp)], out) for inp, out in lengths.draw(num, rng)]


def text_samples(num: int, lengths: Lengths, filler: Filler, units: Sequence[Unit], rng: np.random.Generator) -> list[Sample]:
    """Take pieces of one text as prompts, from random places in it. The text's end is followed by its beginning."""
    if not units:
        raise _empty_text()
    prefix = _passage(units, 0, lengths.prefix_len)
    drawn = lengths.draw(num, rng)
    starts = rng.integers(0, len(units), num)
    return [
        _sample(filler, [*prefix, *_passage(units, int(start), inp)], out)
        for start, (inp, out) in zip(starts, drawn, strict=True)
    ]


def passages(units: Sequence[Unit]) -> Draw:
    """Return what draws pieces of a text, from random places in it. Raises InvalidRequestError if there is no text."""
    if not units:
        raise _empty_text()
    return lambda rng, num: _passage(units, int(rng.integers(0, len(units))), num)


def trace_samples(num: int, rows: Sequence[TraceRow], length_scale: float, filler: Filler, seed: int) -> list[Sample]:
    """Make requests of the first rows of a trace, with lengths divided by `length_scale` (at least 1).

    Blocks with equal hashes have equal units, so their prompts share prefixes as those of the trace did.
    Raises InvalidRequestError if the trace is too short, or the scale is not over 0.
    """
    if not (length_scale > 0 and math.isfinite(length_scale)):
        raise InvalidRequestError(f"length-scale must be over 0; got {length_scale:g}", param="length_scale")
    if num > len(rows):
        raise InvalidRequestError(
            f"the trace has {len(rows)} requests, fewer than {num} (warm-ups included)", param="num_prompts"
        )
    rng = np.random.default_rng(seed)
    samples = []
    for row in rows[:num]:
        length = max(1, round(row.input_len / length_scale))
        units = _blocks(row, length, length_scale, filler, seed) if row.hash_ids else filler.draw(rng, length)
        samples.append(_sample(filler, units, max(1, round(row.output_len / length_scale)), row.arrival_s))
    return samples


def azure_rows(path: Path) -> list[TraceRow]:
    """Read one of Azure's traces, a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens.

    Raises InvalidRequestError if the file can't be read, or holds something else.
    """
    text = read_text(path)
    reader = csv.DictReader(text.splitlines())
    try:
        columns = reader.fieldnames or ()
        lines = [(reader.line_num, values) for values in reader]
    except csv.Error as error:
        raise _bad(path, reader.line_num, str(error)) from None
    if any(column not in columns for column in _AZURE_COLUMNS):
        raise _bad(path, 1, f"the columns should be {', '.join(_AZURE_COLUMNS)}")
    rows: list[TraceRow] = []
    begin: datetime | None = None
    for number, values in lines:
        try:
            # Python reads microseconds; the files have a digit more.
            at = datetime.fromisoformat(values["TIMESTAMP"][:26])
            lengths = int(values["ContextTokens"]), int(values["GeneratedTokens"])
            begin = at if begin is None else begin
            arrival_s = (at - begin).total_seconds()  # a TypeError where one row has a time zone, and the other none
        except (TypeError, ValueError) as error:
            raise _bad(path, number, str(error)) from None
        rows.append(_row(path, number, arrival_s, *lengths))
    return rows


def mooncake_rows(path: Path) -> list[TraceRow]:
    """Read one of Mooncake's traces, a JSONL file with timestamp (ms), input_length, output_length and hash_ids.

    Raises InvalidRequestError if the file can't be read, or holds something else.
    """
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            hash_ids = tuple(int(each) for each in values["hash_ids"])
            arrival_s = float(values["timestamp"]) / 1000
            lengths = int(values["input_length"]), int(values["output_length"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise _bad(path, number, f"{type(error).__name__} {error}") from None
        if len(hash_ids) * _BLOCK_TOKENS < lengths[0]:
            raise _bad(path, number, f"{len(hash_ids)} blocks of {_BLOCK_TOKENS} don't cover {lengths[0]} tokens")
        rows.append(_row(path, number, arrival_s, *lengths, hash_ids))
    return rows


def conversations(path: Path) -> list[tuple[str, str]]:
    """Read the first question and its answer of each of ShareGPT's conversations that has both, as text that can be sent.

    Raises InvalidRequestError if the file can't be read, or holds something else.
    """
    try:
        entries = json.loads(read_text(path))
        found = [_first_turns(entry) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _bad(path, None, f"no list of conversations: {type(error).__name__} {error}") from None
    turns = [each for each in found if each is not None]
    if not turns:
        raise _bad(path, None, "no conversation has a question and an answer")
    return turns


def read_text(path: Path) -> str:
    """Read a text file. Raises InvalidRequestError if it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{path}: can't be read: {error.strerror}", param="dataset_path") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{path}: this is no UTF-8 text", param="dataset_path") from None


def _first_turns(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    turns = entry["conversations"]
    if len(turns) < 2:
        return None
    question, answer = str(turns[0]["value"]), str(turns[1]["value"])
    return (question, answer) if all(each.strip() and _is_unicode(each) for each in (question, answer)) else None


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, such as JSON's escapes can write: no server takes that."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _passage(units: Sequence[Unit], start: int, num: int) -> list[Unit]:
    return [units[(start + i) % len(units)] for i in range(num)]


def _empty_text() -> InvalidRequestError:
    return InvalidRequestError("the text file is empty", param="dataset_path")


def _blocks(row: TraceRow, length: int, length_scale: float, filler: Filler, seed: int) -> list[Unit]:
    """The prompt's blocks; the last one is cut where the prompt ends, which leaves it a prefix of the whole block."""
    block_len = math.ceil(_BLOCK_TOKENS / length_scale)
    units: list[Unit] = []
    for hash_id in row.hash_ids[: math.ceil(length / block_len)]:
        units += filler.draw(np.random.default_rng((seed, hash_id)), block_len)
    return units[:length]


def _drawn(length: int, ratio: float, num: int, rng: np.random.Generator, least: int) -> list[int]:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return [max(least, int(value)) for value in rng.integers(low, high + 1, num)]


def _sample(filler: Filler, units: Sequence[Unit], output_len: int, arrival_s: float | None = None) -> Sample:
    return Sample(prompt=filler.prompt(units), prompt_len=len(units), output_len=output_len, arrival_s=arrival_s)


def _row(path: Path, line: int, arrival_s: float, input_len: int, output_len: int, hash_ids: tuple[int, ...] = ()) -> TraceRow:
    if max(input_len, output_len) > MOST_TOKENS:
        raise _bad(path, line, f"a length is over {MOST_TOKENS} tokens")
    if input_len < 0 or output_len < 0 or not math.isfinite(arrival_s) or any(each < 0 for each in hash_ids):
        raise _bad(path, line, "lengths and hashes must not be negative, nor times infinite")
    return TraceRow(arrival_s=arrival_s, input_len=input_len, output_len=output_len, hash_ids=hash_ids)


def _bad(path: Path, line: int | None, problem: str) -> InvalidRequestError:
    where = "" if line is None else f", line {line}"
    return InvalidRequestError(f"{path}{where}: {problem}", param="dataset_path")
