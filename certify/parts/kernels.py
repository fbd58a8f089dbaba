"""The part `kernels`: every Triton kernel against float64, small models against other ways to compute them; then the times.

Each group of cases has a process of its own: an illegal access leaves the others, and kernels are compiled beside each other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from certify.ceilings import ceilings
from certify.findings import Device, Findings
from certify.kernels import bits as bit_cases
from certify.kernels import cases as kernel_cases
from certify.kernels import times as kernel_times
from certify.kernels.cases import FP8_LIMIT, LIMITS, Heads
from certify.shapes import LLAMA_8B, fitting
from certify.small_model import graph_error, model_error
from configs.machine import usable_cores
from engine.gpu_checks import OLDEST_FP8, current_gpu
from engine.memory.kv_pool import KVPool

MOST_PROCESSES = 8
"""Each takes half a gigabyte of a GPU's memory, and some cores for what is computed in float64."""
MODEL_LIMIT, GRAPH_LIMIT = 1e-3, 0.1
"""Largest difference of a logprob that passes, in float32 and in bfloat16."""
LARGE_VOCABULARY, MISSED_PICKS = 100_000, 1 / 16
"""Masses of top-p are summed in float32, in float64 on the processor: of a large vocabulary a token at the border may fall on
the other side."""
POSITIONS = (0, 1, 63, 64, 511, 512, 700, 4095, 8191, 16_383, 16_500, 17_500)
"""Positions of tokens whose attention is compared: at the borders of tiles and parts, and between them."""
LIMIT_S = 120.0
"""Time limit for one group of cases, in seconds."""
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Case:
    """Work for a kernel, and the relative error that it may have."""

    name: str
    error: Callable[[], float]
    limit: float


@dataclass(frozen=True)
class Group:
    """Cases that share a process."""

    kernel: str
    dtype: torch.dtype

    @property
    def limit(self) -> float:
        """The relative error that its kernels may have."""
        return LIMITS[self.dtype]

    def __str__(self) -> str:
        return f"{self.kernel}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Sizes:
    """The shapes and lengths that kernels are tried with."""

    heads: Sequence[Heads]
    block_sizes: Sequence[int]
    decode_lengths: Sequence[Sequence[int]]
    prefill_chunks: Sequence[tuple[int, int]]
    window: int
    """Tokens that a token sees in a layer with a sliding window."""
    matrices: Sequence[tuple[int, int]]
    """Inputs and outputs of products."""
    product_rows: Sequence[int]
    rows: int
    hidden: int
    inner: int
    vocabularies: Sequence[int]


SIZES: dict[Device, Sizes] = {
    "cuda": Sizes(
        heads=[Heads(32, 8, 128), Heads(9, 3, 64), Heads(14, 2, 64), Heads(16, 1, 128)],
        block_sizes=[16, 1, 64],
        decode_lengths=[[4096, 4095, 1, 0, 1000, *range(500, 560)], [7000]],
        prefill_chunks=[(0, 1500), (1000, 1129), (63, 66), (2047, 2049), (17_000, 17_040)],
        window=1000,
        matrices=[(4096, 6144), (576, 1000)],
        product_rows=[1, 16, 40, 100, 1500],
        rows=300,
        hidden=8192,
        inner=14_336,
        vocabularies=[1500, 9000, 128_256],
    ),
    "cpu": Sizes(
        heads=[Heads(4, 2, 64)],
        block_sizes=[16],
        decode_lengths=[[129, 1, 0]],
        prefill_chunks=[(0, 19), (63, 66)],
        window=50,
        matrices=[(96, 72)],
        product_rows=[1, 17, 130],
        rows=5,
        hidden=64,
        inner=96,
        vocabularies=[1500],
    ),
}
_DTYPES: dict[Device, Sequence[torch.dtype]] = {
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
    "cpu": (torch.float16, torch.float32),  # Triton's interpreter multiplies no bfloat16
}


def run(findings: Findings, device: Device) -> None:
    """Try all groups, several at a time, then measure."""
    with ThreadPoolExecutor(min(MOST_PROCESSES, len(os.sched_getaffinity(0)))) as threads:
        list(threads.map(lambda group: _run_group(findings, group, device), groups(device)))
    if device == "cuda":
        _measure(findings)


def groups(device: Device) -> list[Group]:
    """Return all groups, those that take longest first."""
    dtypes = _DTYPES[device]
    attention = [Group(kernel, dtype) for kernel in ("prefill attention", "decode attention") for dtype in dtypes]
    products = [Group("products", dtype) for dtype in dtypes]
    small = [Group("between products", dtype) for dtype in dtypes]
    graphs = [Group("graphs", torch.bfloat16)] if device == "cuda" else []
    fp8 = [Group("KV in fp8", torch.bfloat16)] if device == "cuda" and current_gpu().capability >= OLDEST_FP8 else []
    whole = [Group("a small model", torch.float32)] if device == "cuda" else []
    # What the interpreter multiplies has other bits in other shapes.
    bits = [Group("bits", dtype) for dtype in dtypes] if device == "cuda" else []
    return [*graphs, *attention, *fp8, *products, *bits, *small, Group("sampling", torch.float32), *whole]


def cases(group: Group, sizes: Sizes) -> Iterator[Case]:
    """Yield the cases of a group."""
    match group.kernel:
        case "decode attention":
            for heads, block_size, window in _layouts(sizes):
                for lengths in sizes.decode_lengths:
                    error = partial(kernel_cases.decode_error, heads, lengths, block_size, group.dtype, window)
                    name = f"{heads}, {len(lengths)} rows, blocks of {block_size}{_windowed(window)}"
                    yield Case(name, error, group.limit)
        case "prefill attention":
            for heads, block_size, window in _layouts(sizes):
                error = partial(kernel_cases.prefill_error, heads, sizes.prefill_chunks, block_size, group.dtype, window)
                yield Case(f"{heads}, blocks of {block_size}{_windowed(window)}", error, group.limit)
        case "KV in fp8":
            yield from _fp8_cases(group, sizes)
        case "products":
            yield from _product_cases(group, sizes)
        case "bits":
            yield from _bit_cases(group, sizes)
        case "between products":
            yield from _small_cases(group, sizes)
        case "graphs":
            yield Case("logprobs beside those of single launches", partial(graph_error, kernel_cases.DEVICE), GRAPH_LIMIT)
        case "a small model":
            error = partial(model_error, kernel_cases.DEVICE)
            yield Case("logprobs beside those of a processor's operators", error, MODEL_LIMIT)
        case "sampling":
            for size in sizes.vocabularies:
                limit = 0.0 if size < LARGE_VOCABULARY else MISSED_PICKS
                yield Case(f"16 rows of {size:,}", partial(kernel_cases.sampling_error, 16, size), limit)


def _layouts(sizes: Sizes) -> Iterator[tuple[Heads, int, int]]:
    """All heads with the first size of blocks, the other sizes with some heads, and some heads with a window."""
    yield from ((heads, sizes.block_sizes[0], 0) for heads in sizes.heads)
    yield from ((sizes.heads[1], size, 0) for size in sizes.block_sizes[1:])
    yield sizes.heads[0], sizes.block_sizes[0], sizes.window


def _windowed(window: int) -> str:
    return f", a window of {window}" if window else ""


def _fp8_cases(group: Group, sizes: Sizes) -> Iterator[Case]:
    dtype, block_size, lengths = group.dtype, sizes.block_sizes[0], sizes.decode_lengths[0]
    for heads in sizes.heads:
        decode = partial(kernel_cases.decode_error, heads, lengths, block_size, dtype, fp8=True)
        yield Case(f"decode attention, {heads}", decode, group.limit)
        prefill = partial(kernel_cases.prefill_error, heads, sizes.prefill_chunks, block_size, dtype, fp8=True)
        yield Case(f"prefill attention, {heads}", prefill, group.limit)
        store = partial(kernel_cases.rotate_and_store_error, heads, range(sizes.rows), sizes.rows + 1, dtype, fp8=True)
        yield Case(f"rotate and store, {heads}", store, FP8_LIMIT)


def _product_cases(group: Group, sizes: Sizes) -> Iterator[Case]:
    for inputs, outputs in sizes.matrices:
        for rows in sizes.product_rows:
            error = partial(bit_cases.product_error, rows, inputs, outputs, group.dtype)
            yield Case(f"{rows} rows, {inputs} to {outputs}", error, group.limit)


def _bit_cases(group: Group, sizes: Sizes) -> Iterator[Case]:
    for inputs, outputs in sizes.matrices:
        check = partial(bit_cases.check_rows_keep_their_bits, inputs, outputs, group.dtype)
        yield Case(f"rows of a product, {inputs} to {outputs}", _no_error(check), 0)
    for heads in sizes.heads:
        check = partial(bit_cases.check_prompt_as_answer, heads, POSITIONS, sizes.block_sizes[0], group.dtype)
        yield Case(f"a prompt and an answer, {heads}", _no_error(check), 0)


def _small_cases(group: Group, sizes: Sizes) -> Iterator[Case]:
    dtype, limit = group.dtype, group.limit
    for heads in sizes.heads:
        slots = [*torch.randperm(3000)[: sizes.rows].tolist(), -1]
        error = partial(kernel_cases.rotate_and_store_error, heads, slots, 3000, dtype)
        yield Case(f"rotate and store, {heads}", error, limit)
        copies = partial(kernel_cases.check_copies, 5, range(1, 4), heads, 61, dtype)
        fingerprints = partial(kernel_cases.check_fingerprints, heads, 61, dtype)
        yield Case(f"gather, scatter and fingerprints, {heads}", _no_error(copies, fingerprints), 0)
    for name, add in (("add and norm", True), ("norm", False)):
        yield Case(name, partial(kernel_cases.add_norm_error, sizes.rows, sizes.hidden, dtype, add=add), limit)
    yield Case("swiglu", partial(kernel_cases.swiglu_error, sizes.rows, sizes.inner, dtype), limit)


def _no_error(*checks: Callable[[], None]) -> Callable[[], float]:
    """Return checks as what a case runs. They have no error: they raise WrongResultError instead."""

    def error() -> float:
        for check in checks:
            check()
        return 0.0

    return error


def _run_group(findings: Findings, group: Group, device: Device) -> None:
    """Run a group in a process of its own, and note what it says until it ends."""
    told, theirs = _SPAWN.Pipe()
    child = _SPAWN.Process(target=group_process, args=(theirs, group, device))
    child.start()
    theirs.close()
    deadline = time.monotonic() + LIMIT_S
    count, problem = 0, ""
    worst: tuple[float, str] = (0.0, "")
    try:
        while told.poll(max(0.0, deadline - time.monotonic())):
            name, error, limit = told.recv()
            count += 1
            row = {"kernel": str(group), "case": name, "error": error, "limit": limit}
            if isinstance(error, str):
                problem = problem or f"{name}: {error}"
            elif not error <= limit:
                problem = problem or f"{name}: an error of {error:.2g}, of which {limit:.2g} is allowed"
            else:
                worst = max(worst, (error, name))
            findings.row("Errors against a reference", row)
        problem = problem or f"no end within {LIMIT_S:g} s"
    except EOFError:
        child.join(LIMIT_S)
    finally:
        told.close()
        child.kill()
        child.join()
    if child.exitcode:
        problem = problem or f"its process ended with {_ending(child.exitcode)} after {count} cases"
    findings.check(str(group), not problem, problem or f"{count} cases; largest error {worst[0]:.1e}")


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def group_process(told: Connection, group: Group, device: Device) -> None:
    """Be the process of a group: tell the name, error and limit of every case; the error is a text where one was raised."""
    torch.set_num_threads(max(1, usable_cores() // MOST_PROCESSES))
    for case in cases(group, SIZES[device]):
        torch.manual_seed(1)
        try:
            error: float | str = case.error()
        except Exception as raised:  # noqa: BLE001 - whatever a kernel makes torch raise is its result
            error = f"{type(raised).__name__}: {raised}".strip().splitlines()[0]
        told.send((case.name, error, case.limit))
    told.close()


def _measure(findings: Findings) -> None:
    """Measure every kernel in the sizes of an 8B model."""
    where = torch.device("cuda")
    best = ceilings(where)
    num_tokens = kernel_times.DECODE_ROWS[-1] * kernel_times.CONTEXT
    facts = fitting(LLAMA_8B, kernel_times.DTYPE, num_tokens, torch.cuda.mem_get_info()[0] * 3 // 4)
    with torch.inference_mode():
        pool = KVPool.for_model(facts, num_tokens, 16, kernel_times.DTYPE, device=where)
        pool.data.normal_()
        for one in kernel_times.timings(facts, pool):
            findings.row(
                "Times of one layer of an 8B model, in bfloat16",
                {
                    "kernel": one.name,
                    "ms": one.seconds * 1e3,
                    "of the copy": f"{one.moved_bytes / one.seconds / best.bytes_per_s:.0%}",
                    "of the product": f"{one.flops / one.seconds / best.flops_per_s:.0%}",
                    "torch's attention, ms": None if one.torch_seconds is None else one.torch_seconds * 1e3,
                },
            )
