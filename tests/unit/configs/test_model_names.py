from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import constants as hub_constants

from configs.facts import WeightFormat, YarnScaling
from configs.model_files.packaged import SMOLLM2
from configs.models import is_here, list_models, resolve, resolve_for
from configs.schema import ClusterConfig
from protocol.errors import ConfigError

Files = Callable[..., Path]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and no network."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


def put_into(cache: Path, repo_id: str, folder: Path) -> Path:
    """Lay a snapshot out as the hub's client does."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "blobs").mkdir()
    (folder / "tokenizer_config.json").write_text("{}")
    folder.rename(snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = repo / "blobs" / f"{number:040}"
        file.rename(blob)
        file.symlink_to(blob)
    return snapshot


def test_a_gguf_file(make_gguf: Files) -> None:
    path = make_gguf("tiny-Q4.gguf")
    model = resolve(str(path))
    assert (model.facts.name, model.facts.weight_format) == ("tiny-Q4", WeightFormat.GGUF)
    assert resolve(str(path), "served").facts.name == "served"


def test_a_relative_path(make_gguf: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf("tiny.gguf")
    monkeypatch.chdir(path.parent)
    assert resolve("tiny.gguf").facts.weight_files == (path,)


def test_a_directory(make_directory: Files) -> None:
    model = resolve(str(make_directory("my-model")))
    assert (model.facts.name, model.facts.weight_format) == ("my-model", WeightFormat.SAFETENSORS)


def test_a_cluster_names_its_model(make_gguf: Files) -> None:
    config = ClusterConfig(model=str(make_gguf()), served_model_name="shown")
    assert resolve_for(config).facts.name == "shown"


@pytest.mark.parametrize("file", ["config.json", "gguf"])
def test_an_override_goes_before_a_scaling_that_is_refused(make_directory: Files, make_gguf: Files, file: str) -> None:
    """DeepSeek-R1-0528-Qwen3-8B declares a YaRN with an attn_factor, which is no key of it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e5, "attn_factor": 0.9}
    if file == "gguf":
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.9}
        declared = {f"llama__rope__scaling__{key}": value for key, value in scaling.items()}
        path = make_gguf(llama__rope__freq_base=5e5, **declared)
    else:
        path = make_directory(rope_parameters=yarn)
    for overrides in ({}, {"rope_theta": 1e6}):
        with pytest.raises(ConfigError, match="attn_factor"):
            resolve_for(ClusterConfig(model=str(path), hf_overrides=overrides))
    stretched = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    facts = resolve_for(ClusterConfig(model=str(path), hf_overrides=stretched)).facts
    assert facts.rope_scaling == YarnScaling(2.0, 32, 0.1 * math.log(2.0) + 1.0)
    assert (facts.rope_theta, facts.max_model_len) == (5e5, 64)


def test_a_hub_model_in_the_cache(hub_cache: Path, make_directory: Files) -> None:
    snapshot = put_into(hub_cache, "org/my-model", make_directory())
    facts = resolve("org/my-model").facts
    assert facts.name == "org/my-model"
    assert facts.weight_files == (snapshot / "model.safetensors",)


def test_a_hub_model_that_cant_be_fetched(hub_cache: Path, make_directory: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"can't fetch org/absent from the .* hub.*HF_HUB_OFFLINE is set") as offline:
        resolve("org/absent")
    assert offline.value.param == "model"
    folder = make_directory()
    (folder / "model.safetensors").unlink()
    put_into(hub_cache, "org/half", folder)
    with pytest.raises(ConfigError, match=r"the weight file model\.safetensors is missing"):
        resolve("org/half")


def test_what_cant_be_a_hub_id(hub_cache: Path) -> None:
    with pytest.raises(ConfigError, match="can't be the id of a model"):
        resolve("org/a--b")


def test_list_models(hub_cache: Path, make_directory: Files, own_cache: Path) -> None:
    assert [(model.name, model.path) for model in list_models()] == [("smollm2", None)]
    put_into(hub_cache, "org/ours", make_directory("a"))
    put_into(hub_cache, "org/not-ours", make_directory("b", architectures=["BertModel"]))
    put_into(hub_cache, "org/quantized", make_directory("c", quantization_config={"quant_method": "fp8"}))
    put_into(hub_cache, "org/no/id", make_directory("d"))
    for number, name in enumerate(("model.safetensors", "tokenizer.json")):
        half = make_directory(f"half-{number}")
        (half / name).unlink()
        put_into(hub_cache, f"org/{half.name}", half)
    SMOLLM2.path.parent.mkdir(parents=True)
    SMOLLM2.path.write_bytes(b"12345")
    listed = list_models()
    assert [(model.name, model.path is not None) for model in listed] == [("smollm2", True), ("org/ours", True)]
    assert listed[0].num_bytes == 5


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), OSError(errno.EIO, "no")])
def test_a_cache_that_cant_be_entered(
    hub_cache: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    real = os.stat

    def guarded(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(own_cache)):
            raise error
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", guarded)
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=error))
    assert not is_here("smollm2")
    assert not is_here(str(own_cache / "model"))
    assert [(model.name, model.path) for model in list_models()] == [("smollm2", None)]
    with pytest.raises(ConfigError, match="can't be written: no; set TANDEM_CACHE to a folder that can"):
        resolve("smollm2")


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have this process see that there is a folder, and nothing in it."""
    real = os.stat

    def guarded(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if folder in Path(str(path)).parents:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", guarded)


def test_a_model_folder_that_cant_be_entered(make_directory: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_directory("private")
    forbid(monkeypatch, folder)
    with pytest.raises(ConfigError, match=r"private' can't be looked up: Permission denied"):
        resolve(str(folder))


def test_a_hub_cache_that_cant_be_entered(
    hub_cache: Path, make_directory: Files, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into(hub_cache, "org/ours", make_directory("a"))
    forbid(monkeypatch, hub_cache)
    assert [model.name for model in list_models()] == ["smollm2"]
    assert not is_here("org/ours")


def test_a_hub_model_that_cant_be_entered(
    hub_cache: Path, make_directory: Files, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, put_into(hub_cache, "org/ours", make_directory("a")))
    assert [model.name for model in list_models()] == ["smollm2"]
    assert not is_here("org/ours")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smolm2", "did you mean smollm2?"),
        ("some model", "give smollm2, a GGUF file, a model directory or a hub id"),
        ("/absent/model", "/absent/model: no such file or directory"),
        ("absent.gguf", "absent.gguf: no such file or directory"),
        ("./absent", "no such file or directory"),
        ("~nobody-has-this-name/x", "~nobody-has-this-name/x: no such file or directory"),
        ("x" * 5000, "can't be looked up"),
        ("\0", "no model"),
    ],
)
def test_names_of_nothing(name: str, says: str) -> None:
    assert not is_here(name[:100])
    with pytest.raises(ConfigError) as caught:
        resolve(name)
    assert says in caught.value.message
    assert len(caught.value.message) < 500


def test_files_and_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the directory has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        resolve(str(tmp_path / "notes.txt"))


def test_a_folder_of_gguf_files_is_refused_with_one_of_them(make_gguf: Files) -> None:
    make_gguf("b.gguf")
    first = make_gguf("a.gguf")
    with pytest.raises(ConfigError, match=rf"no config\.json; give the path of a GGUF file in it, such as {first}"):
        resolve(str(first.parent))


def test_resolving_needs_no_torch(make_gguf: Files, make_directory: Files) -> None:
    """The router's process never loads it, and a worker's start is short enough without a second reason to."""
    program = f"""
import sys
from configs.models import resolve
resolve({str(make_gguf())!r})
resolve({str(make_directory())!r})
assert not {{"torch", "transformers", "huggingface_hub"}} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)
