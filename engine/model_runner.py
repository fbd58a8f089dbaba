"""Runs one rank's model: chunks in, sampled tokens out.

A runner is loaded once and then used from one thread. `execute` stays in torch operators, which let go of the
interpreter lock, so that an event loop in another thread keeps running beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from configs.facts import KvCacheDtype, ModelFacts
from configs.profiles import read_profile
from configs.sharding import check_tensor_parallel_size, rank_facts
from engine.arithmetic import arithmetic_name
from engine.batch import Chunk, ForwardBatch, SampledToken
from engine.batch_invariance import what_varies
from engine.gpu_checks import check_gpu, check_shapes, current_gpu, tokens_that_fit
from engine.gpu_memory import peak_bytes
from engine.gpu_trial import SOME_STEP, LargestStep, trial_steps
from engine.memory.kv_pool import LAYOUT_VERSION, KVPool, token_bytes
from engine.memory.populator import Populator
from engine.models.decoder import Decoder, DecoderWeights
from engine.models.packing import Quantization, WeightFormat
from engine.models.weights import load_weights
from engine.native.build import load_library
from engine.native.library import NativeLibrary
from engine.native.sampling import NativeSampler
from engine.operators import step_factory
from engine.operators.recorded_steps import RecordedDecoder, can_record
from engine.profiling.key import profile_key
from engine.ranks.tensor_parallel import ALONE, TensorParallel
from engine.run_ahead import RunAhead
from engine.sampler import SampleRequest, sample
from protocol.errors import ConfigError
from protocol.messages.workers import KvLayout

log = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
Forward = Callable[[ForwardBatch, Callable[[int], None] | None], Tensor | None]
"""A batch, and what to call after each layer, to logits: `Decoder.forward` with its pool."""
Sample = Callable[[Tensor, Sequence[SampleRequest]], list[SampledToken]]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
"""Processor features, as `torch.cpu.get_capabilities` names them, that multiply bfloat16 without emulation."""


class ModelRunner:
    """One rank's model with its KV pool. `facts` and `layout` are those of the whole model."""

    def __init__(
        self,
        facts: ModelFacts,
        forward: Forward,
        sample: Sample,
        pool: KVPool,
        dtype_name: str,
        arithmetic: str,
        run_ahead: RunAhead | None = None,
    ) -> None:
        """`run_ahead` is told of steps that nothing is sampled in, where `forward` does not wait for the device."""
        self.facts = facts
        self.pool = pool
        self.dtype_name = dtype_name
        self.arithmetic = arithmetic
        """Name of the rank's arithmetic (`engine.arithmetic`). What it computes has the bits of any other rank of this name."""
        self._forward = forward
        self._sample = sample
        self._run_ahead = run_ahead
        self.populator = Populator(pool) if pool.data.device.type == "cpu" else None

    @classmethod
    def load(
        cls,
        facts: ModelFacts,
        *,
        dtype: DtypeName,
        block_size: int,
        num_kv_tokens: int,
        kept_kv_tokens: int | None = None,
        shared_kv: bool = False,
        shared_weights: bool = False,
        quantization: Quantization = "auto",
        kv_cache_dtype: KvCacheDtype = "auto",
        ranks: TensorParallel = ALONE,
        device: DeviceName = "cpu",
        gpu_memory_utilization: float = 0.9,
        largest_step: LargestStep = SOME_STEP,
    ) -> ModelRunner:
        """Read the weights and set aside the pool, for as many threads as torch has. Raises ConfigError for what can't work.

        A pool of `shared_kv` lies in memory that other processes can read, and `shared_weights` in a file that all processes of
        this machine map (`engine.models.weight_file`). `quantization` as in `engine.models.packing.WeightFormat`. With several
        `ranks` this one reads its share of the weights, and its pool has as many tokens, of its own KV heads. `kept_kv_tokens`
        as in `KVPool.for_model`.

        On `cuda`, the current GPU, weights and pool lie in its memory, of which this worker takes `gpu_memory_utilization`,
        what its `largest_step` takes included: the pool has at least `num_kv_tokens`, and as many more as that allows. `auto`
        is cuda where there is a GPU.
        """
        _check_sizes(facts)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        check_tensor_parallel_size(facts, ranks.size, quantization, param="tensor_parallel_size")
        _check_kv_format(kv_cache_dtype, device)
        own = rank_facts(facts, ranks.size)
        dtype_name = resolve_dtype(dtype, device)
        torch_dtype, torch_device = DTYPES[dtype_name], torch.device(device)
        if device == "cuda":
            check_shapes(own, torch_dtype)
            check_gpu(current_gpu(), own, torch_dtype, num_kv_tokens, gpu_memory_utilization, kv_cache_dtype)
        options = (dtype, quantization, kv_cache_dtype)
        library = _native_library(facts, *options, ranks.size) if device == "cpu" else None
        with torch.inference_mode():
            format_ = WeightFormat(torch_dtype, quantization, library, torch_device)
            weights = load_weights(facts, format_, ranks.rank, ranks.size, shared=shared_weights)
        arithmetic = own_arithmetic(
            own, weights, library, dtype_name, block_size, quantization, ranks.size, kv_cache_dtype=kv_cache_dtype
        )
        if device == "cuda":
            step_bytes = cls._try_on_gpu(own, weights, block_size, torch_dtype, kv_cache_dtype, largest_step, ranks)
            token = token_bytes(own, torch_dtype, kv_cache_dtype)
            num_tokens = tokens_that_fit(token, gpu_memory_utilization, step_bytes, num_kv_tokens)
            num_kv_tokens = ranks.least(num_tokens, torch_device)
        pool = KVPool.for_model(
            own,
            num_kv_tokens,
            block_size,
            torch_dtype,
            kept_tokens=kept_kv_tokens,
            shared=shared_kv,
            device=torch_device,
            kv_cache_dtype=kv_cache_dtype,
        )
        if device == "cuda":
            return cls.on_gpu(facts, weights, pool, dtype_name, arithmetic, largest_step.rows, ranks)
        return cls.on_processor(facts, weights, pool, library, dtype_name, arithmetic, ranks)

    @classmethod
    def on_processor(
        cls,
        facts: ModelFacts,
        weights: DecoderWeights,
        pool: KVPool,
        library: NativeLibrary | None,
        dtype_name: str,
        arithmetic: str,
        ranks: TensorParallel = ALONE,
    ) -> ModelRunner:
        """Return a runner with one rank's weights and pool in a processor's memory. `library` has the operators, if any do."""
        own = rank_facts(facts, ranks.size)
        sampler = sample if library is None else NativeSampler(library)
        if library is not None and ranks.size == 1 and can_record(own, weights):
            return cls(facts, RecordedDecoder(own, weights, pool, library).forward, sampler, pool, dtype_name, arithmetic)
        decoder = Decoder(own, weights, step_factory(own, library), ranks)
        return cls(facts, lambda batch, on_layer: decoder.forward(batch, pool, on_layer), sampler, pool, dtype_name, arithmetic)

    @classmethod
    def on_gpu(
        cls,
        facts: ModelFacts,
        weights: DecoderWeights,
        pool: KVPool,
        dtype_name: str,
        arithmetic: str,
        max_rows: int = 128,
        ranks: TensorParallel = ALONE,
    ) -> ModelRunner:
        """Return a runner with one rank's weights and pool in a GPU's memory. It captures graphs for decode steps of up to
        `max_rows` streams.
        """
        # Triton exists for Linux alone, and machines without a GPU need not wait for its import.
        from engine.cuda_graphs import GraphedDecoder, cuda_capture, graph_rows
        from engine.device_sampler import sample_on_device

        with torch.inference_mode():
            own = rank_facts(facts, ranks.size)
            decoder = GraphedDecoder(own, weights, pool, cuda_capture(), graph_rows(max_rows), ranks)
        # The other ranks sample nothing, and say that a step is over when it is.
        ahead = RunAhead(torch.cuda.default_stream(pool.data.device).record_event, steps=1 if ranks.rank == 0 else 0)
        return cls(facts, decoder.forward, sample_on_device, pool, dtype_name, arithmetic, ahead)

    @classmethod
    def _try_on_gpu(
        cls,
        facts: ModelFacts,
        weights: DecoderWeights,
        block_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: KvCacheDtype,
        largest: LargestStep,
        ranks: TensorParallel,
    ) -> int:
        """Compile all that steps launch, by computing the largest ones. Returns the bytes that they take beside the pool."""
        from engine.device_sampler import sample_on_device

        steps, num_tokens = trial_steps(largest, facts.max_model_len, block_size)
        cuda = torch.device("cuda")
        pool = KVPool.for_model(facts, num_tokens, block_size, dtype, device=cuda, kv_cache_dtype=kv_cache_dtype)
        decoder = Decoder(facts, weights, step_factory(facts, None), ranks)
        runner = cls(
            facts, lambda batch, on_layer: decoder.forward(batch, pool, on_layer), sample_on_device, pool, str(dtype), "trial"
        )
        for step in steps:
            runner.execute(step)  # compiles, and has libraries take what they keep
        return sum(peak_bytes(lambda step=step: runner.execute(step)) for step in steps[:2])  # type: ignore[misc]

    def layout(self) -> KvLayout:
        """Layout that another worker's KV must have to fit into this worker's pool."""
        return KvLayout(
            model_hash=self.facts.identity,
            dtype=self.dtype_name,
            kv_cache_dtype=self.pool.kv_cache_dtype,
            num_layers=self.facts.num_layers,
            num_kv_heads=self.facts.num_kv_heads,
            head_dim=self.facts.head_dim,
            layout_version=LAYOUT_VERSION,
            memory=self.pool.data.device.type,
            positions=self.facts.positions,
        )

    def execute(self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> list[SampledToken | None]:
        """Compute the chunks' tokens, write their KV, and sample after each chunk that asks for it.

        Returns one entry per chunk, in order; None where nothing was to be sampled. `on_layer(i)` is called from this
        thread right after layer i's KV of all chunks is in the pool, before the layer's attention.

        All ranks execute the same chunks in the same order. The first samples, the others return None everywhere. Raises
        WorkerLostError if a rank is lost.
        """
        for chunk in chunks:
            if chunk.constraint is not None:
                chunk.constraint.begin()
        tables = [chunk.block_table for chunk in chunks if not chunk.continues]
        mapped_ahead = nullcontext() if self.populator is None else self.populator.step(tables)
        with mapped_ahead, torch.inference_mode():
            batch = ForwardBatch.build(chunks, self.pool.block_size)
            logits_SV = self._forward(batch, on_layer)
            results: list[SampledToken | None] = [None] * len(chunks)
            if logits_SV is not None:
                sampled: Sequence[int] = batch.sampled_chunks
                if any(chunk.scores is not None for chunk in chunks):
                    logits_SV, sampled = _score(logits_SV, batch, chunks)
                requests = [_request(chunks[i]) for i in sampled]
                for i, token in zip(sampled, self._sample(logits_SV, requests), strict=True):
                    results[i] = token
            elif self._run_ahead is not None:
                self._run_ahead.launched()
        return results


def own_arithmetic(
    facts: ModelFacts,
    weights: DecoderWeights,
    library: NativeLibrary | None,
    dtype_name: str,
    block_size: int,
    quantization: Quantization,
    num_ranks: int,
    *,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> str:
    """Return the name of the arithmetic by which a rank computes with these weights, of these `facts`, after it was tried."""
    if weights.rope_frequencies.is_cuda:
        operators = "triton-{}.{}".format(*current_gpu().capability)
    else:
        operators = "torch" if library is None else library.arithmetic
    with torch.inference_mode():
        variation = what_varies(
            facts,
            weights,
            lambda facts: step_factory(facts, library),
            DTYPES[dtype_name],
            block_size,
            kv_cache_dtype=kv_cache_dtype,
        )
    if variation is not None:
        log.info("answers may depend on what is computed with them, and how: %s", variation)
    return arithmetic_name(
        operators,
        dtype_name,
        quantization,
        num_ranks,
        kv_cache_dtype=kv_cache_dtype,
        positions=facts.positions,
        varies=variation is not None,
    )


def resolve_dtype(name: DtypeName, device: DeviceName = "cpu") -> str:
    """Return the dtype to compute in. `auto` is bfloat16 on GPUs and on processors that multiply it or have native operators,
    else float32.

    float16 is for GPUs.
    """
    if name == "auto":
        if device == "cuda":
            return "bfloat16"
        capabilities = torch.cpu.get_capabilities()
        multiplies = any(capabilities.get(feature) for feature in _NATIVE_BFLOAT16)
        return "bfloat16" if multiplies or load_library(torch.bfloat16) is not None else "float32"
    supported = [known for known in DTYPES if known != "float16" or device == "cuda"]
    if name not in supported:
        raise ConfigError(f"{name} is not supported; choose one of auto, {', '.join(supported)}", param="dtype")
    return name


def _native_library(
    facts: ModelFacts, dtype: DtypeName, quantization: Quantization, kv_cache_dtype: KvCacheDtype, num_ranks: int
) -> NativeLibrary | None:
    """The operators for as many threads as torch has. Products are computed as was measured here, if anything was."""
    threads = torch.get_num_threads()
    key = profile_key(
        facts, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype, ranks=num_ranks, threads=threads
    )
    profile = read_profile(key)
    return NativeLibrary.load(threads, DTYPES[resolve_dtype(dtype)], () if profile is None else profile.products)


def _score(logits_SV: Tensor, batch: ForwardBatch, chunks: Sequence[Chunk]) -> tuple[Tensor, Sequence[int]]:
    """Give prompts their logprobs. What is left are the rows to sample from, and their chunks."""
    positions = batch.positions_T[batch.sample_rows_S.numpy()].tolist()
    for i, chunk in enumerate(chunks):
        if chunk.scores is not None:
            rows = [row for row, of in enumerate(batch.sampled_chunks) if of == i]
            chunk.scores.add(logits_SV, rows, [positions[row] for row in rows])
    ends = [
        (row, i)
        for row, i in enumerate(batch.sampled_chunks)
        if chunks[i].sampling is not None and positions[row] == chunks[i].end - 1
    ]
    return logits_SV[[row for row, _ in ends]], [i for _, i in ends]


def _request(chunk: Chunk) -> SampleRequest:
    assert chunk.sampling is not None, "only chunks that sample have logits"
    allowed_V = None if chunk.constraint is None else chunk.constraint.allowed(chunk.sampling, chunk.num_generated)
    return SampleRequest(chunk.sampling, chunk.end, chunk.num_generated, chunk.history, allowed_V, chunk.tail)


def _check_kv_format(kv_cache_dtype: KvCacheDtype, device: DeviceName) -> None:
    if kv_cache_dtype == "fp8" and device == "cpu":
        raise ConfigError("fp8 is for GPUs: use auto or int8", param="kv_cache_dtype")
    if kv_cache_dtype == "int8" and device == "cuda":
        raise ConfigError("int8 is for processors: use auto or fp8", param="kv_cache_dtype")


def _check_sizes(facts: ModelFacts) -> None:
    if facts.num_heads % facts.num_kv_heads:
        raise ConfigError(
            f"{facts.name}: {facts.num_heads} heads can't share {facts.num_kv_heads} key/value heads evenly", param="model"
        )
    if facts.head_dim % 2:
        raise ConfigError(f"{facts.name}: a head size of {facts.head_dim} can't be rotated; it must be even", param="model")
