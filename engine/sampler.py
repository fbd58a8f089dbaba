"""From logits to tokens: a pure function of (seed, choice, position of the new token, tokens before it, logits row).

A row is treated alone, so what else is in the batch can't change its token. The order is that of vLLM, but for min-p, which
comes last as in transformers (vLLM has it before top-k and top-p):

1. Stop tokens are masked while `min_tokens` is not reached.
2. Biases are added.
3. Penalties are taken off. They are counted anew from the token ids at every step, so a stream that goes on elsewhere needs
   nothing else.
4. What a grammar (`engine.grammar`) forbids is masked, so that neither biases nor penalties bring it back.
5. Logits are divided by the temperature.
6. top-k, top-p and min-p narrow the choice, each seeing what the one before left.
7. One token is drawn.

The draw is the Gumbel-max trick (Gumbel, 1954; see Maddison et al., "A* Sampling", 2014): the token with the largest
`logit / temperature + noise` is distributed as softmax. The noise is counter-based (`engine.kernels.noise`), so a draw
can be repeated anywhere. It is also bounded, so a token too far below the best one can't win whatever its noise. Such a token
is left out before any noise is made, which changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import SampledToken
from engine.grammar import Allowed, Constraint
from engine.kernels.noise import NOISE_RANGE, gumbel, noise_key, noise_words, words_above
from protocol.sampling import FinishReason, SamplingParams, TokenLogprobs, TokenProb

_Row = npt.NDArray[np.float32]
_Ids = npt.NDArray[np.uint32]

_NEAR_BEST = 3.0
"""Nats below the best token. Those within are scored first, to bound what the rest must reach."""


@dataclass(frozen=True)
class SampleRequest:
    """What a row of logits is sampled for."""

    sampling: SamplingParams
    position: int
    """Position of the new token in its sequence."""
    num_generated: int
    """Tokens of the answer before it."""
    history: Sequence[int] = ()
    """All tokens before it, prompt and answer, but for the `tail`; read only for penalties."""
    allowed_V: Allowed | None = None
    """Which tokens may be chosen, if a grammar says so; it has the last word on stop tokens, too."""
    tail: Sequence[int] = ()
    """The tokens of the answer right before it that are drafts."""

    @property
    def masks_stops(self) -> bool:
        if self.allowed_V is not None:
            return False
        return self.num_generated < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)

    @property
    def adjusts(self) -> bool:
        """Whether anything is done to the logits before the temperature."""
        return self.allowed_V is not None or self.masks_stops or self.sampling.penalizes or bool(self.sampling.logit_bias)


def sample(logits_SV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """One token per row of the float32 logits. Equal best tokens of a greedy row: the lowest id."""
    best_S = torch.argmax(logits_SV, dim=-1).tolist()
    rows_SV: _Row = logits_SV.numpy()
    return [_sample_row(row, best, request) for row, best, request in zip(rows_SV, best_S, requests, strict=True)]


def finish_reason(
    sampling: SamplingParams, token_id: int, num_generated: int, constraint: Constraint | None = None
) -> FinishReason | None:
    """Whether the answer ends with this token, which its constraint takes note of. `num_generated` counts it.

    Raises InvalidRequestError if the constraint failed.
    """
    if constraint is not None:
        constraint.check()
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if constraint is not None:
        constraint.accept(token_id)
        if constraint.complete:
            return FinishReason.STOP
    if num_generated >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def _sample_row(row_V: _Row, best: int, request: SampleRequest) -> SampledToken:
    sampling = request.sampling
    adjusted_V = row_V
    if request.adjusts:
        adjusted_V = adjusted(row_V, request)
        best = int(adjusted_V.argmax())
    token_id = best if sampling.temperature == 0 else _gumbel_max(*narrow(adjusted_V, best, sampling), request)
    if sampling.num_logprobs is None:
        return SampledToken(token_id, None)
    return SampledToken(token_id, logprobs(row_V, token_id, sampling.num_logprobs))


def adjusted(row_V: _Row, request: SampleRequest) -> _Row:
    """A copy of the logits with biases added and penalties taken off, as vLLM defines them, and what may not be masked."""
    sampling, result_V = request.sampling, row_V.copy()
    if request.masks_stops:
        result_V[list(sampling.stop_token_ids)] = -np.inf
    for each in sampling.logit_bias:
        result_V[each.token_id] += np.float32(each.bias)
    if sampling.repetition_penalty != 1:
        # np.unique sorts, which takes up to four times as long with a long history. All streams of the worker wait for it.
        is_seen_V = np.zeros(len(result_V), np.bool_)
        is_seen_V[np.asarray(request.history, dtype=np.int64)] = True
        is_seen_V[np.asarray(request.tail, dtype=np.int64)] = True
        seen = np.flatnonzero(is_seen_V)
        logits, factor = result_V[seen], np.float32(sampling.repetition_penalty)
        result_V[seen] = np.where(logits > 0, logits / factor, logits * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        first = len(request.history) + len(request.tail) - request.num_generated
        parts = [np.asarray(part, dtype=np.int64) for part in (request.history[first:], request.tail)]
        said, counts = np.unique(np.concatenate(parts), return_counts=True)
        result_V[said] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        result_V[said] -= np.float32(sampling.presence_penalty)
    if request.allowed_V is not None:
        np.copyto(result_V, -np.inf, where=~request.allowed_V)
    return result_V


def narrow(logits_V: _Row, best: int, sampling: SamplingParams) -> tuple[_Ids, _Row]:
    """The tokens that may be drawn, by rising id, and how far their scaled logits lie below the best one's (0 or less).

    Tokens that no noise could make win are left out too; they weigh V * exp(-26) of the best one at most.
    """
    # Near temperature 0 all but the best lie infinitely far below. The best stays even where its own gap is no number: the
    # temperature is 0 in float32, or every token is masked.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        gaps_V = (logits_V - logits_V[best]) / np.float32(sampling.temperature)
    gaps_V[best] = 0
    hopeful_V = gaps_V >= -NOISE_RANGE
    ids, gaps = np.flatnonzero(hopeful_V).astype(np.uint32), gaps_V[hopeful_V]
    if 0 < sampling.top_k < len(ids):
        # Tokens as likely as the last one stay, as in vLLM and transformers.
        kth = np.partition(gaps, -sampling.top_k)[-sampling.top_k]
        ids, gaps = _keep(gaps >= kth, ids, gaps)
    if sampling.top_p < 1:
        ids, gaps = _keep(_top_p(gaps, sampling.top_p), ids, gaps)
    if sampling.min_p > 0:
        ids, gaps = _keep(gaps >= math.log(sampling.min_p), ids, gaps)
    return ids, gaps


def _keep(chosen: npt.NDArray[np.bool_], ids: _Ids, gaps: _Row) -> tuple[_Ids, _Row]:
    return ids[chosen], gaps[chosen]


def _top_p(gaps: _Row, top_p: float) -> npt.NDArray[np.bool_]:
    """The fewest likeliest tokens whose mass reaches `top_p`, at least one; of equally likely ones, lower ids come first."""
    mass = np.exp(gaps)
    total = mass.sum(dtype=np.float64)
    # Tokens below this bound weigh (1 - top_p) of the total at most, all together: they are cut, and need no sorting.
    bound = min((1 - top_p) * total / len(mass), mass.max())
    contenders = np.flatnonzero(mass >= bound)
    falling = contenders[np.argsort(-gaps[contenders], kind="stable")]
    mass_before = np.concatenate(([0.0], np.cumsum(mass[falling], dtype=np.float64)[:-1]))
    chosen = np.zeros(len(gaps), dtype=np.bool_)
    chosen[falling[mass_before < top_p * total]] = True
    chosen[falling[0]] = True
    return chosen


def _gumbel_max(ids: _Ids, gaps: _Row, request: SampleRequest) -> int:
    """The id with the largest gap + noise; the lowest one if two are equal."""
    key = noise_key(request.sampling.seed, request.sampling.choice, request.position)
    words = noise_words(key, ids)
    near = gaps >= -_NEAR_BEST
    lead = float((gaps[near] + gumbel(words[near])).max())
    # A token that is not near the best can only beat `lead` with this much noise: logarithms for the rest are saved.
    contenders = near | (words < words_above(lead + _NEAR_BEST))
    scores = gaps[contenders] + gumbel(words[contenders])
    return int(ids[contenders][scores.argmax()])


def logprobs(row_V: _Row, token_id: int, num_top: int) -> TokenLogprobs:
    """log softmax of the raw logits; equal ones in order of their ids."""
    best = float(row_V.max())
    log_total = best + math.log(np.exp(row_V - np.float32(best)).sum(dtype=np.float64))
    top: tuple[TokenProb, ...] = ()
    if num_top:
        num_top = min(num_top, len(row_V))
        nth = np.partition(row_V, -num_top)[-num_top]
        ids = np.flatnonzero(row_V >= nth)
        ids = ids[np.argsort(-row_V[ids], kind="stable")][:num_top]
        top = tuple(TokenProb(int(i), float(row_V[i]) - log_total) for i in ids)
    return TokenLogprobs(float(row_V[token_id]) - log_total, top)
