"""Prompts of the right length, prefixes where a trace has them, and files that are not what they should be."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.copying.tasks import KINDS, copying_prompts, packaged, paragraphs
from loadtest.datasets import (
    Lengths,
    TraceRow,
    azure_rows,
    conversations,
    mooncake_rows,
    random_samples,
    read_text,
    text_samples,
    trace_samples,
)
from loadtest.fillers import COMMON_WORDS, Filler, token_filler, word_filler
from protocol.errors import InvalidRequestError

fillers = st.sampled_from([token_filler(range(5, 900)), word_filler()])


def units(prompt: object) -> list[object]:
    return list(prompt) if isinstance(prompt, tuple) else [*str(prompt).split(" ")]


@given(
    num=st.integers(0, 20),
    inputs=st.integers(1, 60),
    outputs=st.integers(1, 60),
    ratio=st.floats(0, 0.99),
    prefix=st.integers(0, 10),
    filler=fillers,
    seed=st.integers(0, 99),
)
def test_random_lengths_lie_where_they_should(
    num: int, inputs: int, outputs: int, ratio: float, prefix: int, filler: Filler, seed: int
) -> None:
    lengths = Lengths(inputs, outputs, ratio, prefix)
    samples = random_samples(num, lengths, filler, np.random.default_rng(seed))
    assert samples == random_samples(num, lengths, filler, np.random.default_rng(seed))
    assert len(samples) == num
    for sample in samples:
        assert len(units(sample.prompt)) == sample.prompt_len
        assert math.floor(inputs * (1 - ratio)) <= sample.prompt_len - prefix <= max(1, math.ceil(inputs * (1 + ratio)))
        assert max(1, math.floor(outputs * (1 - ratio))) <= sample.output_len <= math.ceil(outputs * (1 + ratio))
        assert units(sample.prompt)[:prefix] == units(samples[0].prompt)[:prefix]


def test_random_prompts_differ() -> None:
    samples = random_samples(50, Lengths(32, 8, 0.0, 0), word_filler(), np.random.default_rng(1))
    assert len({sample.prompt for sample in samples}) == 50


@given(seed=st.integers(0, 99), length=st.integers(1, 30))
def test_pieces_of_a_text_are_in_it(seed: int, length: int) -> None:
    text = [str(number) for number in range(12)]
    for sample in text_samples(5, Lengths(length, 3, 0.0, 2), word_filler(), text, np.random.default_rng(seed)):
        words = units(sample.prompt)
        assert words[:2] == ["0", "1"]
        numbers = [int(str(word)) for word in words[2:]]
        assert len(numbers) == length
        assert all((after - before) % 12 == 1 for before, after in pairwise(numbers))


@given(
    hashes=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=6),
    last=st.integers(1, 512),
    scale=st.sampled_from([1.0, 3.0, 8.0, 100.0, 2000.0]),
    filler=fillers,
)
def test_equal_hashes_are_equal_prefixes(hashes: list[list[int]], last: int, scale: float, filler: Filler) -> None:
    rows = [TraceRow(0.0, 512 * (len(ids) - 1) + last, 10, tuple(ids)) for ids in hashes]
    samples = trace_samples(len(rows), rows, scale, filler, seed=4)
    block = math.ceil(512 / scale)
    for row, sample in zip(rows, samples, strict=True):
        assert sample.prompt_len == len(units(sample.prompt)) == max(1, round(row.input_len / scale))
        assert sample.output_len == max(1, round(10 / scale))
        for other_row, other in zip(rows, samples, strict=True):
            shared = 0
            for mine, theirs in zip(row.hash_ids, other_row.hash_ids, strict=False):
                if mine != theirs:
                    break
                shared += 1
            same = min(shared * block, sample.prompt_len, other.prompt_len)
            assert units(sample.prompt)[:same] == units(other.prompt)[:same]
            if scale == 1.0 and shared < min(len(row.hash_ids), len(other_row.hash_ids)):
                assert sample.prompt != other.prompt


def test_a_trace_that_is_too_short_or_scaled_by_nothing() -> None:
    rows = [TraceRow(0.0, 10, 10)]
    with pytest.raises(InvalidRequestError, match="fewer than 2"):
        trace_samples(2, rows, 1.0, word_filler(), 0)
    with pytest.raises(InvalidRequestError, match="length-scale"):
        trace_samples(1, rows, 0.0, word_filler(), 0)


def test_azure_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0319600,3180,8\n"
    )
    first, second = azure_rows(path)
    assert first == TraceRow(0.0, 4808, 10)
    assert second == TraceRow(second.arrival_s, 3180, 8)
    assert second.arrival_s == pytest.approx(1.052)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,x\n")
    with pytest.raises(InvalidRequestError, match=r"trace.csv, line 2: .*'x'"):
        azure_rows(path)
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,3,1\n2023-11-16 18:17:09+00:00,396,10\n"
    )
    with pytest.raises(InvalidRequestError, match=r"line 3: .*offset-naive"):
        azure_rows(path)
    long = "5" * 140_000
    for text in ('TIMESTAMP,ContextTokens,GeneratedTokens\n1,"2,3\n' + long, long):
        path.write_text(text)
        with pytest.raises(InvalidRequestError, match="field larger than field limit"):
            azure_rows(path)
    path.write_text("a,b\n")
    with pytest.raises(InvalidRequestError, match="columns"):
        azure_rows(path)
    with pytest.raises(InvalidRequestError, match="can't be read"):
        azure_rows(tmp_path / "none.csv")


def test_mooncake_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 1500, "input_length": 600, "output_length": 50, "hash_ids": [3, 9]}
    path.write_text(json.dumps(row) + "\n\n")
    assert mooncake_rows(path) == [TraceRow(1.5, 600, 50, (3, 9))]
    bad = [row | {"hash_ids": [3]}, row | {"timestamp": "soon"}, row | {"hash_ids": [3, -9]}, {"timestamp": 0}]
    bad += [row | {"hash_ids": [math.inf]}, row | {"input_length": math.inf}, row | {"output_length": 10**400}]
    for each in bad:
        path.write_text(json.dumps(row) + "\n" + json.dumps(each) + "\n")
        with pytest.raises(InvalidRequestError, match="line 2") as error:
            mooncake_rows(path)
        assert error.value.param == "dataset_path"
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidRequestError, match="line 1: RecursionError"):
        mooncake_rows(path)


def test_sharegpt_files(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    half = [{"from": "human", "value": "\ud83d"}, turns[1]]
    path.write_text(json.dumps([{"conversations": each} for each in (turns, turns[:1], half)]))
    assert conversations(path) == [("Hi", "Hello.")]
    for text in ("{", "[" * 100_000, "[1]", "[]", '[{"conversations": []}]', '{"a": 1}'):
        path.write_text(text)
        with pytest.raises(InvalidRequestError, match=r"chats\.json"):
            conversations(path)


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        read_text(path)
    with pytest.raises(InvalidRequestError, match="empty"):
        text_samples(1, Lengths(1, 1, 0.0, 0), word_filler(), [], np.random.default_rng(0))


@pytest.mark.parametrize("values", [(0, 1, 0.0, 0), (1, 0, 0.0, 0), (1, 1, 1.0, 0), (1, 1, -0.1, 0), (-1, 1, 0.0, 5)])
def test_lengths_that_can_not_be(values: tuple[int, int, float, int]) -> None:
    with pytest.raises(InvalidRequestError):
        Lengths(*values)


def test_common_words_are_distinct() -> None:
    assert len(set(COMMON_WORDS)) == len(COMMON_WORDS) > 100


@given(num=st.integers(0, 12), seed=st.integers(0, 1000))
def test_prompts_to_copy_from_begin_the_copy(num: int, seed: int) -> None:
    prose = packaged("prose")
    prompts = copying_prompts(num, prose, np.random.default_rng(seed))
    assert len(prompts) == num
    assert prompts == copying_prompts(num, prose, np.random.default_rng(seed))
    for number, prompt in enumerate(prompts):
        begun = prompt[-12:]
        if KINDS[number % len(KINDS)] == "edits":
            begun = begun.replace("found", "result")
        assert prompt.count(begun) >= 2, "what is to be copied stands in the prompt"


def test_a_text_to_copy_from_needs_paragraphs() -> None:
    assert len(paragraphs("one\n\ntwo\n\n\n\nthree\n")) == 3
    with pytest.raises(InvalidRequestError) as refused:
        paragraphs("one\n\ntwo")
    assert refused.value.param == "dataset_path"
