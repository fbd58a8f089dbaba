"""What one engine says that computes everything itself: the reference for workers that hand KV to each other."""

from __future__ import annotations

from engine.batch import Chunk
from engine.model_runner import ModelRunner
from tests.fault.scenarios import Reference, greedy
from tests.fault.test_migration import endless


def said_alone(runner: ModelRunner) -> Reference:
    """Greedy tokens for a prompt, which is computed in one piece. All of the pool is this sequence's."""

    def generate(prompt: list[int], max_tokens: int, stops: bool = True) -> list[int]:
        tokens, sampling = list(prompt), greedy(max_tokens) if stops else endless(max_tokens)
        table, computed = range(runner.pool.num_blocks), 0
        while len(tokens) < len(prompt) + max_tokens:
            chunk = Chunk(tokens[computed:], computed, table, sampling=sampling, num_generated=len(tokens) - len(prompt))
            (token,) = runner.execute([chunk])
            assert token is not None
            computed = len(tokens)
            tokens.append(token.token_id)
            if stops and token.token_id == 0:
                break
        return tokens[len(prompt) :]

    return generate
