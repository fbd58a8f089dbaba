from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.model_files.gguf_file import read_gguf_index
from configs.models import resolve
from protocol.errors import ConfigError

Files = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with every kind of metadata."""
    path = tmp_path_factory.mktemp("gguf") / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_bool("a.bool", True)
    writer.add_int8("a.int8", -3)
    writer.add_uint64("a.uint64", 2**63)
    writer.add_float64("a.float64", 0.5)
    writer.add_string("a.string", "é")
    writer.add_array("a.strings", ["x", "", "ü"])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_tensor("w", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_gguf_index(path)
    assert caught.value.param == "model"
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def test_every_kind_of_metadata(tmp_path: Path, tiny_bytes: bytes) -> None:
    path = tmp_path / "kinds.gguf"
    path.write_bytes(tiny_bytes)
    index = read_gguf_index(path)
    assert index.metadata == {
        "general.architecture": "llama",
        "a.bool": True,
        "a.int8": -3,
        "a.uint64": 2**63,
        "a.float64": 0.5,
        "a.string": "é",
        "a.strings": ["x", "", "ü"],
        "a.floats": [0.5, 1.5],
    }
    tensor = index.tensors["w"]
    assert (tensor.shape, tensor.type_name, tensor.num_bytes) == ((2, 32), "F32", 256)
    assert np.frombuffer(tiny_bytes, np.float32, 64, tensor.offset).tolist() == list(range(64))


def test_the_default_model_reads_as_the_gguf_package_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_CACHE")
    (path,) = resolve("smollm2").facts.weight_files
    index = read_gguf_index(path)
    reader = gguf.GGUFReader(path)
    ours = [(t.name, t.shape, t.type_name, t.offset, t.num_bytes) for t in index.tensors.values()]
    assert ours == [
        (t.name, tuple(t.shape[::-1].tolist()), t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    plain = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(index.metadata) == plain
    for key in plain:
        if key not in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
            assert index.metadata[key] == reader.fields[key].contents()
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert len(index.metadata[key]) == len(reader.fields[key].data)
        assert index.metadata[key][20_000] == reader.fields[key].contents(20_000)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    assert "not a GGUF file" in refused(path)
    path.write_bytes(b"PK\x03\x04 something else")
    assert "not a GGUF file" in refused(path)
    assert "Is a directory" in refused(tmp_path)
    assert "No such file" in refused(tmp_path / "absent")


@pytest.mark.parametrize(("version", "says"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions(tmp_path: Path, tiny_bytes: bytes, version: int, says: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny_bytes[:4] + struct.pack("<I", version) + tiny_bytes[8:])
    assert says in refused(path)


def test_every_truncation_is_noticed(tmp_path: Path, tiny_bytes: bytes) -> None:
    path = tmp_path / "x.gguf"
    for size in range(4, len(tiny_bytes)):
        path.write_bytes(tiny_bytes[:size])
        assert "truncated" in refused(path)


@given(st.data())
def test_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, tiny_bytes: bytes, data: st.DataObject
) -> None:
    """Whatever is in the header, no reading beyond the file, no endless loop, no other error."""
    damaged = bytearray(tiny_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(4, len(damaged) - 257))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        index = read_gguf_index(path)
    except ConfigError:
        return
    assert all(tensor.offset + tensor.num_bytes <= len(damaged) for tensor in index.tensors.values())


def test_absurd_counts_are_refused_at_once(tmp_path: Path, tiny_bytes: bytes) -> None:
    path = tmp_path / "x.gguf"
    for offset in (8, 16):
        damaged = bytearray(tiny_bytes)
        damaged[offset : offset + 8] = struct.pack("<Q", 2**61)
        path.write_bytes(damaged)
        assert "truncated" in refused(path)


def test_names_given_twice(tmp_path: Path, tiny_bytes: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny_bytes.replace(b"a.int8", b"a.bool"))
    assert "a.bool is there twice" in refused(path)


@pytest.mark.parametrize("alignment", [0, 1, 4, 24])
def test_alignment(make_gguf: Files, alignment: int) -> None:
    assert f"power of two from 8 on, not {alignment}" in refused(make_gguf(general__alignment=alignment))


def test_tensors_lie_where_they_may(tmp_path: Path, tiny_bytes: bytes) -> None:
    path = tmp_path / "x.gguf"
    before = b"w" + struct.pack("<IQQI", 2, 32, 2, 0)
    assert before + struct.pack("<Q", 0) in tiny_bytes
    for offset in (1, 16):
        path.write_bytes(tiny_bytes.replace(before + struct.pack("<Q", 0), before + struct.pack("<Q", offset)) + bytes(16))
        assert "tensor w lies at no multiple of general.alignment" in refused(path)
