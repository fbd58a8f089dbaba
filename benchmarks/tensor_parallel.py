"""What tensor parallelism over gloo costs and saves on one machine: `python -m benchmarks.tensor_parallel`.

Every rank is a process with one thread; they talk over loopback. First the sum of [rows, 2,048] partial results, as the engine
makes it (gathered, then added by rank) and by gloo's all-reduce, in turns. Then steps of a model with random weights in the
shapes of Llama 3.2 1B, but a quarter of its layers and 32,000 tokens, on one and on two ranks, greedy sampling included.
Medians in milliseconds, of a step also the time for which the first rank's thread computed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from benchmarks.lib.environment import write_result
from configs.facts import Architecture, ModelFacts, WeightFormat
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from engine.models.parameters import layer_parameters, model_parameters
from engine.models.safetensors_weights import SafetensorsWeights
from engine.ranks.tensor_parallel import ALONE, TensorParallel, connect
from protocol.sampling import SamplingParams

HIDDEN, BLOCK_SIZE, CONTEXT = 2048, 16, 256
ROWS, SUM_RANKS, STEP_RANKS = (1, 16, 512), (2, 3), (1, 2)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SEQUENCES, PROMPT = (1, 16), 256
WARM, STEPS, SUMS = 3, 15, 200
GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
DEADLINE_S = 300.0

Work = Callable[[TensorParallel, Any], dict[str, float]]


def main() -> None:
    sums = {count(size): ranks_answer(size, measure_sums, None) for size in SUM_RANKS}
    with tempfile.TemporaryDirectory() as folder:
        facts = random_model(Path(folder))
        steps = {count(size): ranks_answer(size, measure_steps, facts) for size in STEP_RANKS}
    write_result("tensor_parallel", {"sums_ms": sums, "steps_ms": steps}, table(sums, steps))


def ranks_answer(size: int, work: Work, subject: Any) -> dict[str, float]:
    """What `work` gives on the first of `size` ranks; all do it at the same time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "store"
        processes = [
            context.Process(target=be_rank, args=(rank, size, place, work, subject, theirs), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        if not ours.poll(DEADLINE_S):
            raise SystemExit(f"{size} ranks gave no answer")
        answer: dict[str, float] = ours.recv()
        for process in processes:
            process.join(DEADLINE_S)
    return answer


def be_rank(rank: int, size: int, place: Path, work: Work, subject: Any, told: Connection) -> None:
    torch.set_num_threads(1)
    ranks = ALONE
    if size > 1:
        ranks = connect(FileStore(str(place), size), rank, size, torch.device("cpu"), "127.0.0.1", DEADLINE_S)
    answer = work(ranks, subject)
    if rank == 0:
        told.send(answer)


def measure_sums(ranks: TensorParallel, _: Any) -> dict[str, float]:
    group: Any = ranks._group
    found: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        for rows in ROWS:
            part = torch.randn(rows, HIDDEN).to(dtype)
            ways: dict[str, Callable[[], Any]] = {
                "gathered": partial(ranks.sum, part),
                "all-reduce": partial(all_reduce, group, part),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(SUMS):
                for way, do in ways.items():
                    times[way].append(seconds(do))
            found |= {f"{name}, {rows} rows, {way}": statistics.median(times[way]) * 1e3 for way in ways}
    return found


def all_reduce(group: Any, part: Tensor) -> None:
    group.allreduce([part.clone()]).wait()


def measure_steps(ranks: TensorParallel, facts: ModelFacts) -> dict[str, float]:
    tokens = max(SEQUENCES) * (CONTEXT + BLOCK_SIZE)
    runner = ModelRunner.load(facts, dtype="bfloat16", block_size=BLOCK_SIZE, num_kv_tokens=tokens, ranks=ranks)
    runner.pool.data.normal_()
    blocks = CONTEXT // BLOCK_SIZE + 1
    steps = {
        f"decode, {sequences} at {CONTEXT}": [
            Chunk(
                token_ids=(50 + i,),
                start=CONTEXT,
                block_table=range(i * blocks, (i + 1) * blocks),
                sampling=GREEDY,
                num_generated=1,
            )
            for i in range(sequences)
        ]
        for sequences in SEQUENCES
    }
    steps[f"prefill of {PROMPT}"] = [
        Chunk(token_ids=range(50, 50 + PROMPT), start=0, block_table=range(blocks), sampling=GREEDY, num_generated=0)
    ]
    found = {}
    for name, chunks in steps.items():
        walls, computing = [], []
        for _ in range(WARM + STEPS):
            began = time.thread_time()
            walls.append(seconds(partial(runner.execute, chunks)))
            computing.append(time.thread_time() - began)
        found[name] = statistics.median(walls[WARM:]) * 1e3
        found[f"{name}, computing"] = statistics.median(computing[WARM:]) * 1e3
    return found


def seconds(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def random_model(folder: Path) -> ModelFacts:
    facts = ModelFacts(
        name="random",
        architecture=Architecture.LLAMA,
        num_layers=4,
        hidden_size=HIDDEN,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=32_000,
        max_model_len=2048,
        rope_theta=500_000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=False,
        qk_norm=False,
        eos_token_ids=(0,),
        model_hash="random",
        weight_format=WeightFormat.SAFETENSORS,
        weight_files=(folder / "model.safetensors",),
    )
    layers = (layer_parameters(facts, layer) for layer in range(facts.num_layers))
    parts = [part for p in (*model_parameters(facts), *(p for layer in layers for p in layer)) for part in p.parts]
    names = SafetensorsWeights((), tied_head=True)
    tensors = {names.stored_name(part.name): torch.randn(part.shape).mul_(0.02).bfloat16() for part in parts}
    save_file(tensors, facts.weight_files[0])
    return facts


def count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def table(sums: dict[str, dict[str, float]], steps: dict[str, dict[str, float]]) -> str:
    lines = [f"| ms for a sum of [rows, {HIDDEN}] | gathered | all-reduce |", "|---|---|---|"]
    for ranks, times in sums.items():
        for name in DTYPES:
            for rows in ROWS:
                mine, other = (times[f"{name}, {rows} rows, {way}"] for way in ("gathered", "all-reduce"))
                lines.append(f"| {ranks}, {name}, {rows} rows | {mine:.2f} | {other:.2f} |")
    kinds = list(next(iter(steps.values())))
    lines += ["", f"| ms for a step | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    lines += [f"| {way} | " + " | ".join(f"{times[kind]:.1f}" for kind in kinds) + " |" for way, times in steps.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
