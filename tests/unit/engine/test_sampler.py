"""Sampling: distribution, narrowing as in transformers, determinism, logprobs, and how an answer ends."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import SampledToken
from engine.kernels.noise import MAX_NOISE, MIN_NOISE, gumbel, noise_key, noise_words
from engine.sampler import SampleRequest, adjusted, finish_reason, narrow, sample
from protocol.sampling import FinishReason, SamplingParams, TokenBias

PLAIN = SamplingParams(seed=11, max_tokens=100)


def request(sampling: SamplingParams, position: int = 10, num_generated: int = 5) -> SampleRequest:
    return SampleRequest(sampling, position, num_generated)


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def chi_square(drawn: list[SampledToken], expected: torch.Tensor) -> float:
    counts = np.bincount([token.token_id for token in drawn], minlength=len(expected))
    wanted = expected.double().numpy() * len(drawn)
    assert counts[wanted == 0].sum() == 0
    return float((((counts - wanted) ** 2)[wanted > 0] / wanted[wanted > 0]).sum())


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        replace(PLAIN, temperature=0.5),
        replace(PLAIN, temperature=3.0),
        replace(PLAIN, top_k=5),
        replace(PLAIN, top_p=0.8),
        replace(PLAIN, min_p=0.1),
        replace(PLAIN, temperature=1.5, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    row = random_logits(1, 12, seed=4, spread=1.5)
    ids, gaps = narrow(row[0].numpy(), int(row.argmax()), sampling)
    expected = torch.zeros(12)
    expected[torch.from_numpy(ids.astype(np.int64))] = torch.softmax(torch.from_numpy(gaps), dim=0)
    drawn = sample(row.expand(8_000, -1), [request(sampling, position=i) for i in range(8_000)])
    assert chi_square(drawn, expected) < 40  # 11 degrees of freedom: one in 25,000


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    ties=st.booleans(),
)
def test_narrowing_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    row = random_logits(1, 50, seed=seed, spread=1.0)
    if ties:
        row = row.round()
        # Which of several equal tokens at the border stays is a choice: ours is tested below.
        top_p = 1.0
    no_ids: Any = None
    warped = TemperatureLogitsWarper(temperature)(no_ids, row)
    if top_k:
        warped = TopKLogitsWarper(top_k)(no_ids, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(no_ids, warped)
    if min_p:
        warped = MinPLogitsWarper(min_p)(no_ids, warped)
    sampling = replace(PLAIN, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, _ = narrow(row[0].numpy(), int(row.argmax()), sampling)
    can_win = warped[0] - warped[0].max() >= MIN_NOISE - MAX_NOISE  # what no noise can save is left out by ours alone
    assert ids.tolist() == can_win.nonzero().flatten().tolist()


def test_ties_at_the_border_go_to_the_lowest_ids() -> None:
    row = np.zeros(10, dtype=np.float32)
    assert narrow(row, 0, replace(PLAIN, top_p=0.35))[0].tolist() == [0, 1, 2, 3]
    assert narrow(row, 0, replace(PLAIN, top_k=3))[0].tolist() == list(range(10))


@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 3.0, 15.0, 60.0]), position=st.integers(0, 2**20))
def test_leaving_out_hopeless_tokens_changes_nothing(seed: int, spread: float, position: int) -> None:
    row = random_logits(1, 500, seed, spread)
    noise = gumbel(noise_words(noise_key(PLAIN.seed, 0, position), np.arange(500, dtype=np.uint32)))
    expected = int(((row[0] - row[0].max()).numpy() + noise).argmax())
    assert sample(row, [request(PLAIN, position)])[0].token_id == expected


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = random_logits(16, 3_000)
    requests = [request(replace(PLAIN, seed=i, top_p=0.95, num_logprobs=3), position=i) for i in range(16)]
    together = sample(logits, requests)
    assert together == [sample(logits[i : i + 1], requests[i : i + 1])[0] for i in range(16)]
    assert together == sample(logits.flip(0).contiguous(), requests[::-1])[::-1]


@pytest.mark.parametrize("change", [{"seed": 12}, {"seed": 11 + (1 << 40)}, {"choice": 1}])
def test_seed_and_choice_matter(change: dict[str, Any]) -> None:
    logits = torch.zeros(200, 50)
    one = sample(logits, [request(PLAIN, position=i) for i in range(200)])
    other = sample(logits, [request(replace(PLAIN, **change), position=i) for i in range(200)])
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 20


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    drawn = sample(logits, [request(replace(PLAIN, temperature=0.0))] * 2)
    assert [token.token_id for token in drawn] == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_stop_tokens_wait_for_min_tokens(temperature: float) -> None:
    logits = torch.tensor([[9.0, 50.0, 8.0, 50.0]])
    sampling = replace(PLAIN, temperature=temperature, min_tokens=6, stop_token_ids=(1, 3), num_logprobs=1)
    early, late = (sample(logits, [request(sampling, num_generated=n)])[0] for n in (5, 6))
    assert early.token_id in (0, 2)
    assert late.token_id in (1, 3)
    assert early.logprobs is not None
    assert early.logprobs.top[0].token_id == 1  # logprobs are those of the model


PENALIZED = [
    replace(PLAIN, presence_penalty=1.5),
    replace(PLAIN, frequency_penalty=0.75),
    replace(PLAIN, repetition_penalty=1.5),
    replace(PLAIN, repetition_penalty=0.5, frequency_penalty=-0.5, presence_penalty=0.25),
    replace(PLAIN, logit_bias=(TokenBias(3, 4.0), TokenBias(7, -100.0)), repetition_penalty=2.0),
]


@pytest.mark.parametrize("sampling", PENALIZED)
@given(
    prompt=st.lists(st.integers(0, 19), max_size=12), answer=st.lists(st.integers(0, 19), max_size=12), seed=st.integers(0, 99)
)
def test_penalties_are_those_of_vllm(sampling: SamplingParams, prompt: list[int], answer: list[int], seed: int) -> None:
    """Written out as `vllm.model_executor.layers.utils.apply_penalties` does it: over whole rows, from counts."""
    from transformers import RepetitionPenaltyLogitsProcessor

    row = random_logits(1, 20, seed)
    expected = row.clone()
    for each in sampling.logit_bias:
        expected[0, each.token_id] += each.bias
    if sampling.repetition_penalty != 1 and prompt + answer:
        penalize = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        expected = penalize(torch.tensor([prompt + answer]), expected)
    counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=20)
    expected -= sampling.frequency_penalty * counts
    expected -= sampling.presence_penalty * (counts > 0)
    asked = SampleRequest(sampling, len(prompt + answer), len(answer), prompt + answer)
    assert adjusted(row[0].numpy(), asked).tolist() == pytest.approx(expected[0].tolist(), abs=1e-5)
    greedy = replace(asked, sampling=replace(sampling, temperature=0.0, num_logprobs=0))
    token = sample(row, [greedy])[0]
    assert token.token_id == int(torch.from_numpy(adjusted(row[0].numpy(), asked)).argmax())
    assert token.logprobs is not None
    assert token.logprobs.chosen == pytest.approx(float(torch.log_softmax(row[0], 0)[token.token_id]), abs=1e-5)


@given(history=st.lists(st.integers(0, 19), max_size=60), penalty=st.sampled_from([0.5, 1.1, 2.0]), seed=st.integers(0, 99))
def test_a_token_is_penalized_once_however_often_it_was_seen(history: list[int], penalty: float, seed: int) -> None:
    """To the bit, so that a stream goes on with the same tokens in a worker of another version."""
    row = random_logits(1, 20, seed)[0].numpy()
    seen, factor = np.unique(np.asarray(history, dtype=np.int64)), np.float32(penalty)
    expected = row.copy()
    expected[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    asked = SampleRequest(replace(PLAIN, repetition_penalty=penalty), len(history), 0, history)
    assert adjusted(row, asked).tobytes() == expected.tobytes()


@pytest.mark.parametrize("sampling", PENALIZED)
@given(
    prompt=st.lists(st.integers(0, 19), max_size=12),
    answer=st.lists(st.integers(0, 19), max_size=12),
    drafts=st.integers(0, 12),
)
def test_a_draft_behind_a_history_is_penalized_as_a_part_of_it(
    sampling: SamplingParams, prompt: list[int], answer: list[int], drafts: int
) -> None:
    row = random_logits(1, 20, len(prompt))[0].numpy()
    joined = SampleRequest(sampling, len(prompt + answer), len(answer), prompt + answer)
    first = len(prompt) + max(0, len(answer) - drafts)
    tail = tuple(joined.history[first:])
    apart = replace(joined, history=array("q", joined.history[:first]), tail=tail)
    assert adjusted(row, apart).tobytes() == adjusted(row, joined).tobytes()


def test_neutral_sampling_adjusts_nothing() -> None:
    assert not SampleRequest(PLAIN, 10, 5, range(10)).adjusts
    assert all(SampleRequest(sampling, 10, 5, range(10)).adjusts for sampling in PENALIZED)


def test_a_bias_of_minus_100_bans_and_of_100_forces() -> None:
    row = random_logits(1, 50)
    forced = replace(PLAIN, logit_bias=(TokenBias(int(row.argmin()), 100.0),))
    banned = replace(PLAIN, temperature=0.0, logit_bias=(TokenBias(int(row.argmax()), -100.0),))
    assert {sample(row, [request(forced, position=i)])[0].token_id for i in range(50)} == {int(row.argmin())}
    assert sample(row, [request(banned)])[0].token_id == int(row[0].topk(2).indices[1])


def test_extreme_temperatures_are_harmless() -> None:
    logits = random_logits(1, 1_000)
    cold = sample(logits, [request(replace(PLAIN, temperature=1e-38))])[0]
    hot = [sample(logits, [request(replace(PLAIN, temperature=1e30), position=i)])[0].token_id for i in range(50)]
    assert cold.token_id == int(logits.argmax())
    frozen = sample(logits, [request(replace(PLAIN, temperature=1e-50, top_k=5, top_p=0.5))])[0]
    assert frozen == cold, "0 in float32"
    assert len(set(hot)) > 40


def test_rows_without_a_best_token_still_give_one() -> None:
    """A request may mask every token of a small vocabulary, and a broken model may compute anything: the engine goes on."""
    masks_all = replace(PLAIN, min_tokens=6, stop_token_ids=(0, 1, 2))
    for row in ([1.0, 2.0, 3.0], [float("nan")] * 3, [float("-inf")] * 3, [float("inf")] * 3, [0.0, float("nan"), 1.0]):
        for sampling in (masks_all, replace(masks_all, temperature=0.0), PLAIN, replace(PLAIN, top_k=2, top_p=0.5, min_p=0.1)):
            assert 0 <= sample(torch.tensor([row]), [request(sampling)])[0].token_id < 3


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3, 1_000)
    logits[0, 77] = logits[0, 33] = logits[0].max() + 1
    sampling = replace(PLAIN, temperature=0.3, top_k=2, num_logprobs=5)
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, token in zip(expected, sample(logits, [request(sampling)] * 3), strict=True):
        assert token.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(row[token.token_id].item(), abs=1e-5)
        wanted = sorted(range(1_000), key=lambda i: (-row[i].item(), i))[:5]
        assert [entry.token_id for entry in token.logprobs.top] == wanted
        assert [entry.logprob for entry in token.logprobs.top] == pytest.approx(row[wanted].tolist(), abs=1e-5)


def test_no_top_logprobs_leaves_the_chosen_one() -> None:
    token = sample(torch.zeros(1, 8), [request(replace(PLAIN, num_logprobs=0))])[0]
    assert token.logprobs is not None
    assert token.logprobs.top == ()
    assert token.logprobs.chosen == pytest.approx(-np.log(8))
    assert sample(torch.zeros(1, 8), [request(PLAIN)])[0].logprobs is None


def test_how_an_answer_ends() -> None:
    sampling = replace(PLAIN, max_tokens=3, stop_token_ids=(2, 7))
    assert finish_reason(sampling, 5, 2) is None
    assert finish_reason(sampling, 7, 2) is FinishReason.STOP
    assert finish_reason(sampling, 5, 3) is FinishReason.LENGTH
    assert finish_reason(sampling, 2, 3) is FinishReason.STOP
