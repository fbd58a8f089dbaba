"""The native sampler draws the tokens of `engine.sampler.sample`, with every set of operators that this machine has."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.native.library import NativeLibrary
from engine.native.sampling import NativeSampler
from engine.sampler import SampleRequest, sample
from protocol.sampling import SamplingParams, TokenBias
from tests.unit.engine.test_instruction_sets import HERE, Variant, forcing, named

PLAIN = SamplingParams(seed=11, max_tokens=100)
BEST = replace(PLAIN, temperature=0.0)
pytestmark = pytest.mark.skipif(not HERE, reason="needs a set of native operators")


@pytest.fixture(scope="module", params=HERE, ids=named)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    variant: Variant = request.param
    with forcing(variant):
        return variant.library(2)


def logits_of(rows: int, tokens: int, seed: int, spread: float) -> torch.Tensor:
    return torch.randn(rows, tokens, generator=torch.Generator().manual_seed(seed)) * spread


PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 1000, 5000]),
    top_p=st.sampled_from([1e-9, 0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0]),
    choice=st.integers(0, 127),
)


@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    tokens=st.sampled_from([1, 2, 63, 64, 65, 128, 1000, 4099]),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    rounded=st.booleans(),
    position=st.integers(1, 2**31 - 1),
)
def test_its_tokens_are_the_sampler_s(
    library: NativeLibrary, params: list[SamplingParams], tokens: int, seed: int, spread: float, rounded: bool, position: int
) -> None:
    logits = logits_of(len(params), tokens, seed, spread)
    if rounded:  # many tokens are as likely as others
        logits = logits.round()
    requests = [SampleRequest(each, position, 5) for each in params]
    assert NativeSampler(library)(logits, requests) == sample(logits, requests)


@pytest.mark.parametrize("spread", [1.0, 3.0, 12.0])
def test_a_large_vocabulary(library: NativeLibrary, spread: float) -> None:
    every = (PLAIN, replace(PLAIN, top_k=40), replace(PLAIN, top_p=0.95), replace(PLAIN, min_p=0.05), BEST)
    requests = [SampleRequest(replace(each, seed=i), 100 + i, 5) for i in range(4) for each in every]
    logits = logits_of(len(requests), 49_152, 3, spread)
    assert NativeSampler(library)(logits, requests) == sample(logits, requests)


def test_rows_that_are_adjusted(library: NativeLibrary) -> None:
    """A grammar's masks, biases, penalties and forbidden ends; logprobs are those of the row as it was."""
    logits = logits_of(6, 50, 1, 2.0)
    allowed = np.zeros(50, dtype=np.bool_)
    allowed[[3, 17, 41]] = True
    requests = [
        SampleRequest(PLAIN, 9, 5, allowed_V=allowed),
        SampleRequest(replace(BEST, num_logprobs=3), 9, 5, allowed_V=allowed),
        SampleRequest(replace(PLAIN, logit_bias=(TokenBias(7, 100.0),), num_logprobs=0), 9, 5),
        SampleRequest(replace(BEST, repetition_penalty=5.0, presence_penalty=1.0), 9, 5, history=tuple(range(40))),
        SampleRequest(replace(PLAIN, min_tokens=10, stop_token_ids=tuple(range(49))), 9, 5),
        SampleRequest(PLAIN, 9, 5),
    ]
    drawn = NativeSampler(library)(logits, requests)
    assert drawn == sample(logits, requests)
    assert drawn[0].token_id in {3, 17, 41}
    assert drawn[2].token_id == 7
    assert drawn[4].token_id == 49


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers(library: NativeLibrary, strange: float) -> None:
    """One of them, two, or all: the token is the sampler's, whatever it is worth."""
    for places in ([70], [5, 90], range(100)):
        logits = logits_of(4, 100, 2, 1.0)
        logits[:, list(places)] = strange
        requests = [SampleRequest(each, 9, 5) for each in (BEST, PLAIN, replace(PLAIN, top_p=0.5), replace(PLAIN, top_k=3))]
        with np.errstate(invalid="ignore"):
            expected = sample(logits, requests)
        assert NativeSampler(library)(logits, requests) == expected


def test_rows_apart_in_memory(library: NativeLibrary) -> None:
    """A part of wider rows."""
    wide = logits_of(3, 200, 5, 2.0)
    requests = [SampleRequest(replace(PLAIN, seed=i), 9, 5) for i in range(3)]
    assert NativeSampler(library)(wide[:, :150], requests) == sample(wide[:, :150].contiguous(), requests)
