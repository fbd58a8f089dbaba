"""The cache folder: `$TANDEM_CACHE`, else `~/.cache/tandem`. Many processes share it.

    models/<distribution>-<version>/   files fetched by name (`configs.model_files.packaged`)
    sha256/<id of a path>.json         checksum of a model file, valid while its size and times stay the same
    native/<compiler>-<set>-<id>.so    the native operators, compiled here (`engine.native.build`); `.failed` where none can be
    weights/<digest>/packed.gguf       packed weights that workers map (`engine.models.weight_file`)
    profiles/<id of a key>.json        what was measured on this kind of processor (`configs.profiles`)

Files appear whole or not at all: they are written beside their place and renamed. Deleting the folder costs time only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from configs.fields import model_error
from protocol.errors import ConfigError

_CHUNK_BYTES = 4 * 1024 * 1024
_SHOW_PROGRESS_BYTES = 1024**3
"""Progress is shown from this size on, since hashing it takes more than a second or two."""


def cache_dir() -> Path:
    """Return the path of the cache folder, which need not exist yet. Raises ConfigError if it would be in no user's home."""
    named = os.environ.get("TANDEM_CACHE") or "~/.cache/tandem"
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{named}: there is no such home; set TANDEM_CACHE to a folder that can be written") from None


def transfer_progress() -> Progress:
    """Return a progress bar on stderr for work that is counted in bytes. The bar leaves no trace when it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Make the folder and hold it against other processes.

    The wait has no deadline of its own: whoever holds the lock works under one, and the kernel frees the lock of a
    process that died. Raises ConfigError if the folder can't be written, or if its file system has no locks.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / ".lock").open("w"))
        except OSError as error:
            raise _unusable(folder, "written", error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # Lustre and NFS may be mounted without locks
            raise _unusable(folder, "locked", error) from None
        yield


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all, and its folder if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    """Return the file's sha256 in hex, from the cache if the file has not changed since.

    Raises ConfigError if it can't be read.
    """
    try:
        status = path.stat()
        # The change time can't be set by hand, so a file that was overwritten and given its old times is noticed too.
        place = str(path.resolve())
        identity: list[Any] = [place, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        entry = cache_dir() / "sha256" / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json"
        digest = _remembered(entry, identity)
        if digest is None:
            digest = _hash(path, status.st_size)
            # A cache that can't be written costs time at the next start and nothing else.
            with suppress(OSError):
                write_whole(entry, json.dumps({"identity": identity, "sha256": digest}).encode())
    except OSError as error:
        raise model_error(f"{path}: can't be read: {error.strerror}") from None
    return digest


def _unusable(folder: Path, done: str, error: OSError) -> ConfigError:
    return model_error(f"{folder}: can't be {done}: {error.strerror}; set TANDEM_CACHE to a folder that can")


def _remembered(entry: Path, identity: list[Any]) -> str | None:
    try:
        known = json.loads(entry.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict) or known.get("identity") != identity or not isinstance(known.get("sha256"), str):
        return None
    return str(known["sha256"])


def _hash(path: Path, num_bytes: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file, transfer_progress() as progress:
        task = progress.add_task(f"Checking {path.name}", total=num_bytes, visible=num_bytes >= _SHOW_PROGRESS_BYTES)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()
