"""What the Triton kernels take of a GPU, compiled ahead of time on any machine: `python -m benchmarks.kernel_resources`.

Every kernel is compiled for compute capabilities 8.0, 8.9 and 9.0 as it is launched for a model of Llama 8B's shape in
bfloat16, attention in float32 and over KV in fp8 too, with tensors on the meta device for the real ones. Then it is read with
the cuobjdump of the Triton package: registers, bytes spilled to local memory, shared memory, and the instructions that tell
whether copies are asynchronous and products take the matrix units.
`--print` prints the figures as JSON and writes no file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.lib.environment import write_result
from certify.shapes import LLAMA_8B
from engine.kernels.triton.decode_attention import DecodeAttention
from engine.kernels.triton.kv_cache import rotate_and_store
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.layers import add_norm, swiglu
from engine.kernels.triton.prefill_attention import prefill_attention, prefill_tiles
from engine.kernels.triton.product import H100, Multiprocessors, product
from engine.kernels.triton.sampling import SamplingRows, sample
from engine.kernels.triton.token_rows import Rows, copy_rows, hash_rows

CAPABILITIES = (80, 89, 90)
_GPUS = {80: Multiprocessors(108, 166_912, bulk_copies=False), 89: Multiprocessors(58, 101_376, bulk_copies=False), 90: H100}
LAYERS, HIDDEN, INNER = LLAMA_8B.num_layers, LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim, LLAMA_8B.vocab_size
BLOCK_SIZE, NUM_BLOCKS = 16, 8192
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
_TYPES[torch.float8_e4m3fn] = "*fp8e4nv"
_INSTRUCTIONS = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "LDG.E.128", "STG.E.128")
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Resources:
    kernel: str
    capability: int
    num_warps: int
    registers: int
    """Per thread."""
    local_bytes: int
    """Per thread: spilled registers and whatever else has no register."""
    shared_bytes: int
    """Per program."""
    instructions: str


def launches(capability: int) -> Iterator[tuple[str, Launch]]:
    """Every kernel in the shapes of an 8B model: 64 sequences of up to 4,096 tokens decode, a chunk of 2,048 is prefilled."""
    yield from _attention("", torch.bfloat16)
    yield from _attention(" float32", torch.float32)
    if capability >= 89:
        yield from _attention(" fp8", torch.bfloat16, torch.float8_e4m3fn)
    yield from _products(_GPUS[capability])
    qkv_width, pool = (HEADS + 2 * KV_HEADS) * HEAD_DIM, _pool(torch.bfloat16)
    ids = _meta(64, dtype=torch.int32)
    angles = _meta(64, HEAD_DIM // 2, dtype=torch.float32)
    decode = DecodeAttention(64, LLAMA_8B.max_model_len, HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, torch.device("meta"))
    yield "parts of contexts", decode.plan(ids)
    yield "rotate and store", rotate_and_store(_meta(64, qkv_width), angles, angles, ids, pool[0], HEADS)
    slots, words = _meta(1024, dtype=torch.int64), KV_HEADS * HEAD_DIM * pool.itemsize // 4
    rows = Rows(_meta(words, dtype=torch.int32), pool.shape[2], words, words)
    dense = Rows(_meta(words, dtype=torch.int32), 1024, words, words)
    yield "copy tokens between pools", copy_rows(rows, rows, (0, 0), LAYERS, (slots, slots), 1024)
    yield "gather tokens", copy_rows(rows, dense, (0, 0), LAYERS, (slots, None), 1024)
    yield "scatter tokens", copy_rows(dense, rows, (0, 0), LAYERS, (None, slots), 1024)
    numbers = _meta(words, dtype=torch.int64)
    hashes = _meta(2 * LAYERS, 64, dtype=torch.int64)
    yield "fingerprint tokens", hash_rows(rows, range(LAYERS), slots, numbers, numbers, numbers, hashes)
    x = _meta(64, HIDDEN, dtype=torch.float32)
    yield "add and norm", add_norm(x, _meta(64, HIDDEN), _meta(HIDDEN), 1e-5, _meta(64, HIDDEN))
    yield "swiglu", swiglu(_meta(64, 2 * INNER), _meta(64, INNER))
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int32, torch.int32)
    asked = SamplingRows(*(_meta(64, dtype=kind) for kind in kinds))
    logits, gaps = (_meta(64, VOCABULARY, dtype=kind) for kind in (torch.float32, torch.int32))
    yield from zip(("scale logits", "draw"), sample(logits, asked, gaps, ids), strict=True)


def compiled(name: str, launch: Launch, capability: int) -> Resources:
    """Compile a launch as Triton would on such a GPU, and read what came out. Raises RuntimeError if cuobjdump fails."""
    names = launch.kernel.arg_names
    signature = dict.fromkeys(names, "constexpr") | {
        parameter: _type(value) for parameter, value in zip(names, launch.args, strict=False)
    }
    parameters = launch.kernel.params
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, value in enumerate(launch.args)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not parameters[i].do_not_specialize)
    }
    source = ASTSource(launch.kernel, signature, dict(launch.constants), aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, code = (_dump(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    fields = dict(word.split(":") for line in usage.splitlines() if "REG:" in line for word in line.split() if ":" in word)
    return Resources(
        kernel=name,
        capability=capability,
        num_warps=launch.num_warps,
        registers=int(fields["REG"]),
        local_bytes=int(fields["STACK"]) + int(fields["LOCAL"]),
        shared_bytes=int(binary.metadata.shared),
        instructions=" ".join(kind for kind in _INSTRUCTIONS if kind in code),
    )


def all_resources() -> list[Resources]:
    jobs = [(name, launch, capability) for capability in CAPABILITIES for name, launch in launches(capability)]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda job: compiled(*job), jobs))


def main() -> None:
    found = all_resources()
    if sys.argv[1:] == ["--print"]:
        print(json.dumps([asdict(one) for one in found]))
        return
    lines = [
        "# What the Triton kernels take of a GPU",
        "",
        "Compiled ahead of time, not run; Llama 8B's shape, in bfloat16 unless named otherwise.",
        "",
        "| kernel | capability | warps | registers a thread | local bytes a thread | shared bytes a program | instructions |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        capability = f"{one.capability // 10}.{one.capability % 10}"
        counts = f"{one.num_warps} | {one.registers} | {one.local_bytes} | {one.shared_bytes:,}"
        lines.append(f"| {one.kernel} | {capability} | {counts} | {one.instructions} |")
    lines += ["", f"Command: `python -m benchmarks.kernel_resources`, Triton {triton.__version__}"]
    write_result("kernel_resources", {"kernels": [asdict(one) for one in found]}, "\n".join(lines))


def _products(gpu: Multiprocessors) -> Iterator[tuple[str, Launch]]:
    for count in (16, 64, 128, 2048):
        x, weight, vocabulary = _meta(count, HIDDEN), _meta(HIDDEN, HIDDEN), _meta(VOCABULARY, HIDDEN)
        yield f"product of {count} rows", product(x, weight, None, _meta(count, HIDDEN), gpu)
        yield f"logits of {count} rows", product(x, vocabulary, None, _meta(count, VOCABULARY, dtype=torch.float32), gpu)
        yield f"wide product of {count} rows", product(x, vocabulary, None, _meta(count, VOCABULARY), gpu)


def _attention(suffix: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Iterator[tuple[str, Launch]]:
    """`kv_dtype` is that of the pool where it is another."""
    qkv_width, width, slots = (HEADS + 2 * KV_HEADS) * HEAD_DIM, 4096 // BLOCK_SIZE, _pool(kv_dtype or dtype)[0]
    tables, lengths = _meta(64, width, dtype=torch.int32), _meta(64, dtype=torch.int32)
    qkv, out = _meta(64, qkv_width, dtype=dtype), _meta(64, HEADS, HEAD_DIM, dtype=dtype)
    decode = DecodeAttention(64, LLAMA_8B.max_model_len, HEADS, KV_HEADS, HEAD_DIM, dtype, torch.device("meta"))
    attend, join = decode.launches(qkv, slots, tables, lengths, BLOCK_SIZE, out)
    yield f"decode attention{suffix}", attend
    yield f"joining its parts{suffix}", join
    tiles = prefill_tiles(np.array([0]), np.array([2048]), np.array([0]), HEADS // KV_HEADS, dtype)
    qkv, out = _meta(2048, qkv_width, dtype=dtype), _meta(2048, HEADS, HEAD_DIM, dtype=dtype)
    tiles_P4 = _meta(*tiles.shape, dtype=torch.int32)
    yield f"prefill attention{suffix}", prefill_attention(qkv, slots, tables[:1], tiles_P4, BLOCK_SIZE, out)
    if kv_dtype is not None:
        angles = _meta(64, HEAD_DIM // 2, dtype=torch.float32)
        yield f"rotate and store{suffix}", rotate_and_store(qkv[:64], angles, angles, lengths, slots, HEADS)


def _pool(dtype: torch.dtype) -> Tensor:
    return _meta(LAYERS, 2, NUM_BLOCKS * BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _type(value: Tensor | TensorDescriptor | int | float) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def _dump(option: str, path: str) -> str:
    done = subprocess.run([_CUOBJDUMP, option, path], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {option} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
