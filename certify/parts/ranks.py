"""The part `ranks`: two ranks compute one model over NCCL, with their collectives inside of CUDA graphs.

Each rank is a process. On two GPUs each has one. NCCL takes no GPU twice on one host, so on a single GPU each process says that
it is a host of its own (NCCL_HOSTID), and they talk over sockets. That is slow, and shows all but speed.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from certify.findings import Device, Findings, PartSkipped
from certify.model_folder import write_model
from certify.random_model import random_matrices
from certify.shapes import LLAMA_8B, TINY
from configs.facts import ModelFacts
from configs.models import resolve
from engine.batch import Chunk
from engine.gpu_trial import LargestStep
from engine.model_runner import DtypeName, ModelRunner
from engine.ranks.tensor_parallel import ALONE, TensorParallel, connect
from protocol.sampling import SamplingParams

SIZE, STEPS, DEADLINE_S, LIMIT_S = 2, 12, 60.0, 75.0
GREEDY = SamplingParams(seed=0, max_tokens=STEPS, temperature=0.0)
ROW_COUNTS = (2, 3, 16, 33, 70)
MEMORY_SHARE, KV_TOKENS = 0.1, 512
_CPU = torch.device("cpu")
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Heard:
    """What one rank reports about itself."""

    answers: list[list[int | None]]
    num_blocks: int
    other_bits_among: list[int]
    """Numbers of rows among which a row's sum has other bits than alone."""
    sum_us: dict[int, float]
    """Rows of 4,096 values, and the microseconds of their sum."""


def run(findings: Findings, device: Device) -> None:
    """Compare two ranks with one. Raises PartSkipped on a processor."""
    if device == "cpu":
        raise PartSkipped("ranks on processors are tested with the rest of Tandem")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", TINY, random_matrices(torch.float32, _CPU, drawn_on=_CPU, seed=3))
        check_ranks(findings, resolve(str(Path(folder) / "model")).facts, Path(folder) / "store")


def check_ranks(findings: Findings, facts: ModelFacts, store: Path) -> None:
    """Note whether two ranks answer as one does, and what their sums take."""
    try:
        first, second = both_ranks(facts, store)
    except RanksError as error:
        findings.check("two ranks load a model and compute", passed=False, detail=str(error))
        return
    alone = answers(load(facts, ALONE))
    findings.check("two ranks answer as one does, in float32", first.answers == alone, f"{first.answers} and {alone}")
    findings.check("only the first rank samples", second.answers == [[None] * STEPS] * 2)
    findings.check("both have a pool of as many blocks", first.num_blocks == second.num_blocks)
    findings.check(
        "a sum has the same bits among any number of rows",
        not first.other_bits_among,
        f"other bits: {first.other_bits_among}",
    )
    where = "two GPUs" if torch.cuda.device_count() > 1 else "one GPU, over sockets"
    for rows, took in first.sum_us.items():
        findings.row("sums over ranks", {"on": where, "rows of 4,096": rows, "µs": took})


class RanksError(Exception):
    """A rank failed or hung."""


def both_ranks(facts: ModelFacts, store: Path) -> tuple[Heard, Heard]:
    """Run two ranks to their end. Raises RanksError."""
    pipes = [_SPAWN.Pipe() for _ in range(SIZE)]
    ranks = [_SPAWN.Process(target=_rank, args=(pipes[rank][1], facts, rank, str(store)), daemon=True) for rank in range(SIZE)]
    try:
        for process in ranks:
            process.start()
        ends = time.monotonic() + LIMIT_S
        heard = []
        for rank, (ours, _) in enumerate(pipes):
            if not ours.poll(max(ends - time.monotonic(), 0.1)):
                raise RanksError(f"rank {rank} said nothing within {LIMIT_S:g} s")
            heard.append(ours.recv())
    except EOFError:
        raise RanksError("a rank died") from None
    finally:
        for process in ranks:
            process.kill()
            process.join(30)
    for rank, one in enumerate(heard):
        if not isinstance(one, Heard):
            raise RanksError(f"rank {rank}: {one}")
    first, second = heard
    return first, second


def _rank(told: Connection, facts: ModelFacts, rank: int, store: str) -> None:
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(rank)
    else:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    try:
        ranks = connect(FileStore(store, SIZE), rank, SIZE, torch.device("cuda"), "127.0.0.1", DEADLINE_S)
        runner = load(facts, ranks)
        told.send(Heard(answers(runner), runner.pool.num_blocks, _other_bits(ranks), _sum_us(ranks)))
        told.recv()  # until this process is killed: the other one may still need it
    except Exception as error:  # noqa: BLE001 - what it was is the report's business
        told.send(f"{type(error).__name__}: {error}")


def load(facts: ModelFacts, ranks: TensorParallel, dtype: DtypeName = "float32") -> ModelRunner:
    """Load a rank's share of the model, with graphs and a pool."""
    return ModelRunner.load(
        facts,
        dtype=dtype,
        block_size=16,
        num_kv_tokens=KV_TOKENS,
        device="cuda",
        gpu_memory_utilization=MEMORY_SHARE,
        ranks=ranks,
        largest_step=LargestStep(64, 4),
    )


def answers(runner: ModelRunner) -> list[list[int | None]]:
    """Return the tokens that are sampled after two prompts: in a step of both, then in steps of single tokens (graphs).

    What follows is not what was sampled, so that ranks which sample nothing compute the same.
    """
    known = [list(range(3, 40)), [9, 8, 7]]
    tables = [[4, 9, 2, 11], [5, 6, 7, 8]]
    chunks = [Chunk(tuple(ids), 0, table, GREEDY, 0) for ids, table in zip(known, tables, strict=True)]
    said: list[list[int | None]] = [[], []]
    for _ in range(STEPS):
        for ids, of, token in zip(known, said, runner.execute(chunks), strict=True):
            of.append(None if token is None else token.token_id)
            ids.append(len(ids) % 50)
        chunks = [Chunk(tuple(ids[-1:]), len(ids) - 1, table, GREEDY, 1) for ids, table in zip(known, tables, strict=True)]
    return said


def _other_bits(ranks: TensorParallel) -> list[int]:
    torch.manual_seed(ranks.rank)
    part = torch.randn(ROW_COUNTS[-1], 512, device="cuda").to(torch.bfloat16)
    alone = torch.cat([ranks.sum(part[row : row + 1].clone()).clone() for row in range(len(part))])
    return [rows for rows in ROW_COUNTS if not torch.equal(ranks.sum(part[:rows].clone()), alone[:rows])]


def _sum_us(ranks: TensorParallel) -> dict[int, float]:
    def us(part: torch.Tensor) -> float:
        return 1e6 * statistics.median(_seconds(partial(ranks.sum, part)) for _ in range(10))

    return {rows: us(torch.ones(rows, LLAMA_8B.hidden_size, dtype=torch.bfloat16, device="cuda")) for rows in (1, 16, 64, 1024)}


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began
