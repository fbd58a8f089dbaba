"""Two ranks of a worker over NCCL: whole models with their collectives inside of CUDA graphs, and sums to the bit.

NCCL takes no GPU twice on one host. So each process says that it is a host of its own (NCCL_HOSTID), and the two talk over
sockets, where there is only one GPU. That is slow, and shows all but speed.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from configs.facts import ModelFacts
from engine.batch import Chunk
from engine.gpu_trial import LargestStep
from engine.model_runner import ModelRunner
from engine.ranks.tensor_parallel import TensorParallel, connect
from protocol.sampling import SamplingParams
from tests.tiny_models import random_model, saved, tiny_facts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZE, DEADLINE_S = 2, 60.0
GREEDY = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
SPAWN = multiprocessing.get_context("spawn")


def load(facts: ModelFacts, ranks: TensorParallel) -> ModelRunner:
    return ModelRunner.load(
        facts,
        dtype="float32",
        block_size=16,
        num_kv_tokens=512,
        device="cuda",
        gpu_memory_utilization=0.02,
        ranks=ranks,
        largest_step=LargestStep(64, 4),
    )


def answers(runner: ModelRunner) -> list[list[int | None]]:
    """Of two prompts: a step of both, then steps of single tokens, which are graphs."""
    known = [list(range(3, 40)), [9, 8, 7]]
    tables = [[4, 9, 2, 11], [5, 6, 7, 8]]
    chunks = [Chunk(ids, 0, table, GREEDY, 0) for ids, table in zip(known, tables, strict=True)]
    said: list[list[int | None]] = [[], []]
    for _ in range(12):
        for ids, of, token in zip(known, said, runner.execute(chunks), strict=True):
            of.append(None if token is None else token.token_id)
            ids.append(len(ids) % 50)  # the same on every rank, whatever was sampled
        chunks = [Chunk(ids[-1:], len(ids) - 1, table, GREEDY, 1) for ids, table in zip(known, tables, strict=True)]
    return said


def rank_process(told: Connection, facts: ModelFacts, rank: int, rendezvous: str) -> None:
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    ranks = connect(FileStore(rendezvous, SIZE), rank, SIZE, torch.device("cuda"), "127.0.0.1", DEADLINE_S)
    try:
        runner = load(facts, ranks)
        told.send((answers(runner), runner.pool.num_blocks, sums_differ(ranks)))
        told.recv()  # until the others are through
    except BaseException as error:
        told.send(error)
        raise


def sums_differ(ranks: TensorParallel) -> list[int]:
    """Numbers of rows among which a row's sum has other bits than alone."""
    torch.manual_seed(ranks.rank)
    part = torch.randn(70, 512, device="cuda").to(torch.bfloat16)
    alone = torch.cat([ranks.sum(part[row : row + 1].clone()).clone() for row in range(len(part))])
    return [rows for rows in (2, 3, 16, 33, 70) if not torch.equal(ranks.sum(part[:rows].clone()), alone[:rows])]


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    facts = tiny_facts("llama", num_layers=3)
    facts = saved(random_model(facts, seed=7), facts, tmp_path / "model")
    pipes = [SPAWN.Pipe() for _ in range(SIZE)]
    rendezvous = str(tmp_path / "store")
    ranks = [
        SPAWN.Process(target=rank_process, args=(pipes[rank][1], facts, rank, rendezvous), daemon=True) for rank in range(SIZE)
    ]
    try:
        for process in ranks:
            process.start()
        heard = []
        for ours, _ in pipes:
            assert ours.poll(150), "a rank hangs"
            heard.append(ours.recv())
    finally:
        for process in ranks:
            process.kill()
            process.join(30)
    for one in heard:
        assert isinstance(one, tuple), one
    (first, first_blocks, differ), (second, second_blocks, _) = heard
    assert first == answers(load(facts, TensorParallel(0, 1, None))), asdict(facts)["name"]
    assert second == [[None] * 12] * 2, "only the first rank samples"
    assert first_blocks == second_blocks
    assert differ == []
