"""Packed weights in a file of the cache folder: made once, then mapped by every process of the machine that computes with them.

    <cache>/weights/<digest>/packed.gguf     the tensors of one rank; packed matrices are bytes to whoever else reads the file

    first process ── lock ──► pack ──► write beside its place, sync, rename ──┐
    every other one, and every later start ───────────────────────────────────┴──► map

The digest is of what the tensors depend on: the model's own hash, type, quantization, order of the values, rank, number of
ranks, and the code that packs. A file never changes, so what lies in memory is one copy for all, and the system may drop pages
that nobody reads. A file that was not mapped for `_UNUSED_DAYS` goes when the next one is written, and so does what a dead
writer left. Where the folder can't be written, or the disk would be more than half full of what is left, each process holds
its own copy.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs import sharding
from configs.cache import cache_dir, exclusive
from configs.model_files.gguf_file import read_gguf_index
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_UNUSED_DAYS, _UNWRITTEN_DAYS = 30, 1
_FILE, _NEW = "packed.gguf", ".new-"
_PACKERS = (
    "kernels/quantized.py",
    "models/gguf_weights.py",
    "models/packing.py",
    "models/parameters.py",
    "models/safetensors_weights.py",
    "models/weight_file.py",
    "models/weight_source.py",
    "native/matrix.py",
    "native/packing.py",
)
"""Modules of the engine that decide what is in a file, beside `configs.sharding`."""
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.uint8}
"""How GGUF calls what is in a file. It has no name for unsigned bytes."""
_ALIGNMENT = 64
"""Bytes that a processor reads at once."""
_MADV_POPULATE_READ = 22
"""Since Linux 5.14. Before, the first steps read what they need."""
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def mapped_tensors(
    name: str,
    identity: tuple[object, ...],
    pack: Callable[[], Iterable[tuple[str, Tensor]]],
    is_current: Callable[[], bool],
) -> dict[str, Tensor]:
    """Return the tensors that `pack` makes, from the file of their `identity`, which is written if there is none.

    Nothing is written if the identity is no longer `is_current` once they are packed. `name` is the model's, for messages. The
    tensors must not be written to. Raises what `pack` raises.
    """
    folder = cache_dir() / "weights" / _digest(identity)
    path = folder / _FILE
    tensors = _map(path)
    if tensors is not None:
        return tensors
    with ExitStack() as held:
        try:
            held.enter_context(exclusive(folder))
        except ConfigError as error:
            log.warning("the weights of %s are not shared: %s", name, error.message)
            return dict(pack())
        tensors = _map(path)
        if tensors is None:
            log.info("packing the weights of %s", name)
            tensors = dict(pack())
            problem = _write(path, tensors) if is_current() else "its files have changed meanwhile"
            if problem is not None:
                log.warning("the weights of %s are not shared: %s", name, problem)
                return tensors
            tensors = _map(path) or tensors
    return tensors


def _digest(identity: tuple[object, ...]) -> str:
    digest = hashlib.sha256(repr(identity).encode())
    engine = Path(__file__).parent.parent
    for module in (*(engine / packer for packer in _PACKERS), Path(sharding.__file__)):
        digest.update(module.read_bytes())
    return digest.hexdigest()[:32]


def _map(path: Path) -> dict[str, Tensor] | None:
    """The tensors of a file that is there and whole."""
    try:
        if not path.exists():
            return None
        index = read_gguf_index(path)
        # Copy-on-write, because torch takes no read-only arrays; nothing writes to it.
        data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
        tensors = {
            name: data[each.offset : each.offset + each.num_bytes].view(_DTYPES[each.type_name]).view(each.shape)
            for name, each in index.tensors.items()
        }
    except (ConfigError, OSError, ValueError, KeyError) as error:
        log.warning("%s will be written anew: %s", path.name, error)
        return None
    with suppress(OSError):  # of another user, or in a folder that can't be written to
        os.utime(path)
    _libc.madvise(data.data_ptr(), data.nbytes, _MADV_POPULATE_READ)
    return tensors


def _write(path: Path, tensors: Mapping[str, Tensor]) -> str | None:
    """Write the file under its folder's lock, and remove others that nobody needs any more; what went wrong, if it did."""
    new = path.with_name(_NEW + path.name)
    try:
        new.unlink(missing_ok=True)  # a dead process has left it, and it takes room
        _remove_old(path.parent.parent)
        size = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(path.parent).free
        if 2 * size > free:
            return f"they take {size / 1e9:.1f} GB, and {path.parent} has {free / 1e9:.1f} GB left"
        _write_gguf(new, tensors)
        with new.open("rb") as written:
            os.fsync(written.fileno())
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        return f"{path.parent}: {error.strerror}"
    return None


def _remove_old(folder: Path) -> None:
    """Remove files that nobody needs any more, and what writers left that must have died. What can't be removed stays."""
    for name, days in ((_FILE, _UNUSED_DAYS), (_NEW + _FILE, _UNWRITTEN_DAYS)):
        for file in folder.glob(f"*/{name}"):
            with suppress(OSError):  # another user's, or another process removes it
                if time.time() - file.stat().st_mtime > days * 86_400:
                    file.unlink()


def _write_gguf(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter  # most processes only read

    logging.getLogger("gguf").setLevel(logging.WARNING)
    types = {dtype: GGMLQuantizationType[name] for name, dtype in _DTYPES.items()}
    writer = GGUFWriter(path, arch="tandem-packed")
    writer.add_custom_alignment(_ALIGNMENT)
    for name, tensor in tensors.items():
        raw = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=types[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
