"""The sampling kernels pick what `engine.sampler` picks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from certify.kernels.cases import DEVICE, picks, random_requests
from engine.kernels.noise import gumbel, noise_key, noise_words
from engine.kernels.triton import noise
from engine.sampler import SampleRequest, sample
from protocol.sampling import SamplingParams
from tests.cases import slow_rows

PLAIN = SamplingParams(seed=11, max_tokens=100)


@triton.jit
def _noise_kernel(seeds: tl.tensor, choice: tl.tensor, position: tl.tensor, words: tl.tensor, noises: tl.tensor) -> None:
    token = tl.arange(0, 512)
    word = noise.noise_words(tl.load(seeds), choice, position, token)
    tl.store(words + token, word)
    tl.store(noises + token, noise.gumbel(word))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 0x0123_4567_89AB_CDEF])
@pytest.mark.parametrize(("choice", "position"), [(0, 0), (3, 8191), (2**31 - 1, 2**20)])
def test_words_are_the_same(seed: int, choice: int, position: int) -> None:
    words = torch.zeros(512, dtype=torch.int32, device=DEVICE)
    noises = torch.zeros(512, dtype=torch.float64, device=DEVICE)
    _noise_kernel[(1,)](torch.tensor([seed], device=DEVICE), choice, position, words, noises)
    expected = noise_words(noise_key(seed, choice, position), np.arange(512, dtype=np.uint32))
    assert np.array_equal(words.cpu().numpy().view(np.uint32), expected)
    np.testing.assert_allclose(noises.cpu().numpy(), gumbel(expected), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("spread", "rounded"), [(4.0, False), (1.0, True), *slow_rows([(0.0, False), (20.0, False)])])
def test_picks_are_the_sampler_s(spread: float, rounded: bool) -> None:
    """Any mixture of parameters; rounded logits have many that are equal, at every border."""
    logits = torch.randn(16, 1500, generator=torch.Generator().manual_seed(2)) * spread
    logits = logits.round() if rounded else logits
    requests = random_requests(len(logits))
    assert picks(logits, requests) == [token.token_id for token in sample(logits, requests)]


def test_a_vocabulary_of_several_passes() -> None:
    logits = torch.randn(2, 9_000, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, 4_000:5_000] = -torch.inf  # what must not be drawn
    requests = [
        SampleRequest(replace(PLAIN, top_k=300, top_p=0.97), 7, 1),
        SampleRequest(replace(PLAIN, temperature=1.7), 8, 1),
    ]
    assert picks(logits, requests) == [token.token_id for token in sample(logits, requests)]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(4))
    logits[0, 33] = logits[0, 600] = 9.0
    requests = [SampleRequest(replace(PLAIN, temperature=temperature), i, 1) for i in range(4)]
    assert picks(logits, requests) == [token.token_id for token in sample(logits, requests)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of infinity less infinity
def test_rows_whose_best_logit_is_not_finite(temperature: float) -> None:
    """What is no number counts as the largest, and the lowest id of several is drawn."""
    nan, inf = torch.nan, torch.inf
    rows = [[0, inf, 1, 2], [0, nan, 1, 2], [-inf, -inf, nan, -inf], [nan, nan, nan, nan], [-inf, -inf, -inf, -inf]]
    logits = torch.tensor([*rows, [0, inf, nan, 1], [inf, 1, inf, 2]])
    for sampling in (PLAIN, replace(PLAIN, top_k=2, top_p=0.5, min_p=0.1)):
        requests = [SampleRequest(replace(sampling, seed=3, temperature=temperature), 7, 1)] * len(logits)
        assert picks(logits, requests) == [token.token_id for token in sample(logits, requests)]
    assert picks(logits, requests)[:3] == [1, 1, 2]
