"""Reading weights from both file formats, and files that do not fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.facts import ModelFacts, WeightFormat
from configs.model_files.hf_directory import facts_from_directory
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from engine.models.gguf_weights import GgufWeights
from engine.models.packing import WeightFormat as LoadFormat
from engine.models.packing import packed_tensors
from engine.models.parameters import Part
from engine.models.weights import load_weights
from engine.native.library import NativeLibrary
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0, num_logprobs=20)
Q = gguf.GGMLQuantizationType

FLOAT32 = LoadFormat(torch.float32, "auto", library=None)
LIBRARY = NativeLibrary.load(1, torch.bfloat16)


def write_gguf(path: Path, tensors: dict[str, np.ndarray[Any, Any]], ggml_type: Any, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for name, values in tensors.items():
        kind = ggml_type if values.ndim > 1 else Q.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_gguf_names(facts: ModelFacts, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A Hugging Face model's tensors as llama.cpp's converter stores them."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, facts.architecture.name), facts.num_layers)
    tensors = {}
    for stored, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        heads = {"q_proj": facts.num_heads, "k_proj": facts.num_kv_heads}.get(stored.split(".")[-2])
        if facts.architecture.value == "llama" and heads:
            # `permute` of convert_hf_to_gguf.py.
            pairs = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert name is not None
        tensors[name] = np.ascontiguousarray(values)
    return tensors


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_both_formats_give_the_same_answer(kind: str, small_model: Any, tmp_path: Path) -> None:
    facts = small_model(kind).facts
    path = tmp_path / "model.gguf"
    write_gguf(path, as_gguf_names(facts, facts.weight_files[0].parent), Q.F32, facts.architecture.value)
    from_gguf = replace(facts, weight_format=WeightFormat.GGUF, weight_files=(path,))
    chunk = Chunk(list(range(40, 60)), 0, range(8), GREEDY, 0)
    one, other = (
        ModelRunner.load(f, dtype="float32", block_size=8, num_kv_tokens=64).execute([chunk]) for f in (facts, from_gguf)
    )
    assert one == other


@pytest.mark.parametrize("ggml_type", [Q.Q4_1, Q.Q8_0, Q.F16, Q.BF16, Q.Q4_0, Q.Q5_1], ids=lambda t: t.name)
def test_dequantization_equals_gguf(ggml_type: Any, tmp_path: Path, small_model: Any) -> None:
    values = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    path = tmp_path / "one.gguf"
    write_gguf(path, {"some.weight": values}, ggml_type)
    source = GgufWeights((path,), small_model("llama").facts.architecture)
    out = torch.empty(96, 64)
    source.read(Part("some.weight", (96, 64)).shard(0, 1), out)
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, ggml_type), ggml_type)
    assert torch.equal(out, torch.from_numpy(np.ascontiguousarray(expected, dtype=np.float32)))


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("ggml_type", [Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda t: t.name)
def test_quantized_values_are_those_of_the_file(ggml_type: Any, heads: int | None, tmp_path: Path, small_model: Any) -> None:
    values = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    path, shard = tmp_path / "one.gguf", Part("some.weight", (96, 64), heads=heads, rotary=True).shard(0, 1)
    write_gguf(path, {"some.weight": values}, ggml_type)
    source = GgufWeights((path,), small_model("llama").facts.architecture)
    dense = torch.empty(96, 64)
    source.read(shard, dense)
    quantized = source.read_quantized(shard)
    assert quantized is not None
    assert torch.equal(quantized.dequantize(torch.float32), dense)


@pytest.mark.parametrize("ggml_type", [Q.F16, Q.F32], ids=lambda t: t.name)
def test_other_formats_are_not_taken_for_quantized(ggml_type: Any, tmp_path: Path, small_model: Any) -> None:
    path = tmp_path / "one.gguf"
    write_gguf(path, {"some.weight": np.zeros((96, 64), dtype=np.float32)}, ggml_type)
    source = GgufWeights((path,), small_model("llama").facts.architecture)
    assert source.read_quantized(Part("some.weight", (96, 64)).shard(0, 1)) is None


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_few_rows_and_many_rows_of_a_four_bit_file_agree(kind: str, small_model: Any, tmp_path: Path) -> None:
    """In bfloat16 the first may take four-bit products and the others bfloat16 ones; float32 stays itself."""
    facts = small_model(kind).facts
    path = tmp_path / "model.gguf"
    write_gguf(path, as_gguf_names(facts, facts.weight_files[0].parent), Q.Q4_1, facts.architecture.value)
    facts = replace(facts, weight_format=WeightFormat.GGUF, weight_files=(path,))
    asks = replace(GREEDY, num_logprobs=facts.vocab_size)

    def distribution(dtype: Any, chunk_tokens: int) -> torch.Tensor:
        runner = ModelRunner.load(facts, dtype=dtype, block_size=8, num_kv_tokens=64)
        for start in range(0, 24, chunk_tokens):
            tokens = list(range(40 + start, 40 + start + chunk_tokens))
            token = runner.execute([Chunk(tokens, start, range(8), asks, 0)])[0]
        assert token is not None
        assert token.logprobs is not None
        return torch.tensor([entry.logprob for entry in sorted(token.logprobs.top, key=lambda entry: entry.token_id)])

    expected = distribution("float32", 24)
    assert (distribution("bfloat16", 24) - expected).abs().mean() < 0.2
    assert (distribution("bfloat16", 4) - expected).abs().mean() < 0.2
    torch.testing.assert_close(distribution("float32", 4), expected, atol=1e-4, rtol=0)


def test_several_shards_are_one_model(small_model: Any, tmp_path: Path) -> None:
    facts = small_model("llama").facts
    tensors = load_file(facts.weight_files[0])
    names = sorted(tensors)
    files = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, file)
    load_weights(replace(facts, weight_files=files), FLOAT32)
    with pytest.raises(ConfigError, match="is missing"):
        load_weights(replace(facts, weight_files=files[:1]), FLOAT32)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(K_PROJ), f"tensor {K_PROJ} is missing"),
        (lambda t: t.update({K_PROJ: t[K_PROJ][:16].clone()}), f"tensor {K_PROJ} is \\[16, 64\\] and should be \\[32, 64\\]"),
        (lambda t: t.update({K_PROJ.replace("weight", "bias"): torch.zeros(32)}), "k_proj.bias has no place in a llama"),
        (
            lambda t: t.update({K_PROJ.replace(".1.", ".3."): t[K_PROJ].clone()}),
            "layers.3.self_attn.k_proj.weight has no place",
        ),
        (lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.int8)}), f"tensor {K_PROJ} holds torch.int8"),
    ],
    ids=["missing", "misshaped", "unexpected", "layer too many", "integers"],
)
def test_files_that_do_not_fit(change: Callable[[Any], Any], message: str, small_model: Any, tmp_path: Path) -> None:
    facts = small_model("llama").facts
    tensors = load_file(facts.weight_files[0])
    change(tensors)
    save_file(tensors, tmp_path / "changed.safetensors")
    with pytest.raises(ConfigError, match=message) as caught:
        load_weights(replace(facts, weight_files=(tmp_path / "changed.safetensors",)), FLOAT32)
    assert caught.value.param == "model"


def test_what_follows_from_the_configuration_may_be_stored_too(small_model: Any, tmp_path: Path) -> None:
    facts = small_model("llama-tied").facts
    tensors = load_file(facts.weight_files[0])
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "more.safetensors")
    load_weights(replace(facts, weight_files=(tmp_path / "more.safetensors",)), FLOAT32)


def test_unreadable_files(small_model: Any, tmp_path: Path) -> None:
    facts = small_model("llama").facts
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(facts.weight_files[0].read_bytes()[:-100])
    for file in (broken, tmp_path / "absent.safetensors"):
        with pytest.raises(ConfigError, match=file.name):
            load_weights(replace(facts, weight_files=(file,)), FLOAT32)


@pytest.mark.skipif(LIBRARY is None, reason="needs AVX2, and a C++ compiler or a wheel")
def test_weights_of_a_model_that_changes_while_it_is_read_are_not_kept(
    tmp_path: Path, small_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(small_model("llama-wide").facts.weight_files[0].parent, tmp_path / "model"))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    facts, format_ = facts_from_directory(folder, "tiny"), LoadFormat(torch.bfloat16, "none", LIBRARY)
    (file,) = facts.weight_files
    before = file.read_bytes()

    def changing(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from packed_tensors(*args)
        file.write_bytes(before[:-1] + b"!")

    with monkeypatch.context() as patched:
        patched.setattr("engine.models.weights.packed_tensors", changing)
        load_weights(facts, format_, shared=True)
    assert "the weights of tiny are not shared: its files have changed meanwhile" in caplog.text
    assert not list((tmp_path / "weights").glob("*/packed.gguf"))
    file.write_bytes(before)
    load_weights(facts, format_, shared=True)
    assert len(list((tmp_path / "weights").glob("*/packed.gguf"))) == 1
