"""The files of a folder in which blocks of KV cache lie, one block each.

    <folder>/tmp/<process>-<random>             being written, locked by its writer
        │ rename: the block is there wholly or not at all
        ▼
    <folder>/<first byte of its key>/<key>      never written again
        │ unlink, by whoever evicts or erases the block, or finds it damaged
        ▼
    gone; a reader who has the file open reads it to its end

A file is a header and the block's bytes. The header has a checksum of its own, so that it can be trusted before the rest is
read. A second checksum covers the bytes together with their key and tenant. Nothing is synced to the disk: what a power cut
leaves of a file does not fit its checksums.

The kernel frees the lock of a writer that died. So its temporary file can be told from one that is still being written, even
when the process id means another process by now.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import xxhash

from configs.arithmetic import ceil_div

_MAGIC = b"tdm-kv\x00\x01"
"""The last byte is the version of the format."""
_FIELDS = struct.Struct("<8s32s32s16sQ16s")
"""Magic, description, key, tenant, bytes of the block, checksum of the block with its key and tenant."""
_HEADER_BYTES = _FIELDS.size + 8
"""The fields and their checksum."""
_MAX_SLICES = os.sysconf("SC_IOV_MAX")
_PAGE_BYTES = 4096
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_IS_KEY = re.compile("[0-9a-f]{64}").fullmatch
_NO_FILES_LEFT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}

Parts = Sequence[memoryview]


class Found(Enum):
    """What became of the search for a block's file."""

    WHOLE = auto()
    MISSING = auto()
    DAMAGED = auto()
    FOREIGN = auto()
    """Written under another description, or by another version."""


class Inspected(NamedTuple):
    """A block's file as it was found. All but `found` is known only if there is a file."""

    found: Found
    inode: int = 0
    tenant: bytes = b""
    written_ns: int = 0


def tenant_tag(tenant: str) -> bytes:
    """Return the 16 bytes by which files and index know a tenant. They never hold its name."""
    return blake2b(tenant.encode(), digest_size=16, person=b"tenant").digest()


def file_bytes(block_bytes: int) -> int:
    """Return what a block of so many bytes takes in a folder: its file, in whole pages."""
    return ceil_div(_HEADER_BYTES + block_bytes, _PAGE_BYTES) * _PAGE_BYTES


class BlockFiles:
    """Writes, reads and removes the files of blocks. It knows nothing of an index. Thread-safe."""

    def __init__(self, folder: Path, described: bytes, block_bytes: int) -> None:
        """The folder must exist. `described` and `block_bytes` are the same for all blocks that fit here."""
        self._folder = os.fspath(folder)
        self._tmp = os.path.join(self._folder, "tmp")
        self._block_bytes = block_bytes
        self._whole_bytes = _HEADER_BYTES + block_bytes
        self.file_bytes = file_bytes(block_bytes)
        """Bytes that a block takes in the folder: its file, in whole pages."""
        self.described = blake2b(struct.pack("<Q", block_bytes) + described, digest_size=32, person=b"blocks").digest()
        """The description as files carry it."""

    @contextmanager
    def written(self, key: bytes, tenant: bytes, parts: Parts) -> Iterator[str]:
        """Write a block to a temporary file and yield its path, to be moved. If it was not, it is removed at the end.

        Raises OSError, also where the disk is full.
        """
        assert sum(part.nbytes for part in parts) == self._block_bytes, "not the bytes of one block"
        path, fd = self._create()
        try:
            _write_whole(fd, [self._header(key, tenant, parts), *parts])
            yield path
        finally:
            with suppress(OSError):  # what is lost by either is found later, as a file that is not whole or a leftover
                os.close(fd)
            with suppress(OSError):
                os.unlink(path)

    def move(self, path: str, key: bytes) -> None:
        """Give a file that was written its name. Raises OSError."""
        try:
            os.rename(path, self._path(key))
        except FileNotFoundError:
            _make_folder(os.path.dirname(self._path(key)))
            os.rename(path, self._path(key))

    def read(self, key: bytes, parts: Parts) -> Inspected:
        """Read a block into `parts`. Unless it is found whole they may hold anything afterwards."""
        assert sum(part.nbytes for part in parts) == self._block_bytes, "not the bytes of one block"
        return self._inspect(key, parts)

    def look(self, key: bytes) -> Inspected:
        """Inspect a block's header and size alone."""
        return self._inspect(key, None)

    def exists(self, key: bytes) -> bool:
        """Return whether there is a file of this name."""
        return os.path.lexists(self._path(key))

    def remove(self, key: bytes) -> bool:
        """Remove a block's file if it is there. Returns False if it can't be removed."""
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def is_still(self, key: bytes, inspected: Inspected) -> bool:
        """Return whether a block's file is the one that was inspected, and not a newer one."""
        try:
            status = os.lstat(self._path(key))
        except OSError:
            return False
        return (status.st_ino, status.st_mtime_ns) == (inspected.inode, inspected.written_ns)

    def keys_with(self, first: int) -> set[bytes]:
        """The keys, beginning with this byte, that files are named by. Files with other names are left alone.

        Raises OSError if that can't be told.
        """
        try:
            names = os.listdir(f"{self._folder}/{first:02x}")
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {key for name in names if _IS_KEY(name) and (key := bytes.fromhex(name))[0] == first}

    def remove_leftovers(self) -> None:
        """Remove the temporary files whose writers have died. Raises OSError if the folder can't be written."""
        _make_folder(self._tmp)
        for name in os.listdir(self._tmp):
            path = f"{self._tmp}/{name}"
            with suppress(OSError):  # somebody writes it, or it is gone
                fd = os.open(path, _READ)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(fd)

    def _create(self) -> tuple[str, int]:
        """Make a temporary file and lock it, before another process can take it for one of the dead."""
        while True:
            path = f"{self._tmp}/{os.getpid()}-{token_hex(8)}"
            try:
                fd = os.open(path, _CREATE, 0o600)
            except FileNotFoundError:
                _make_folder(self._tmp)
                continue
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return path, fd
            os.close(fd)  # it was taken for one, and is removed

    def _path(self, key: bytes) -> str:
        name = key.hex()
        assert len(name) == 64, f"{name} is no key"
        return f"{self._folder}/{name[:2]}/{name}"

    def _header(self, key: bytes, tenant: bytes, parts: Parts) -> bytes:
        checksum = _checksum(key, tenant, parts)
        fields = _FIELDS.pack(_MAGIC, self.described, key, tenant, self._block_bytes, checksum)
        return fields + xxhash.xxh3_64_digest(fields)

    def _inspect(self, key: bytes, parts: Parts | None) -> Inspected:
        try:
            fd = os.open(self._path(key), _READ)
        except FileNotFoundError:
            return Inspected(Found.MISSING)
        except OSError as error:
            return self._not_opened(key, error)
        try:
            status = os.fstat(fd)
            found, tenant = self._content(fd, status, key, parts)
            return Inspected(found, status.st_ino, tenant, status.st_mtime_ns)
        finally:
            os.close(fd)

    def _not_opened(self, key: bytes, error: OSError) -> Inspected:
        """Say what a file is that is there but can't be opened: a link, or one without the right to read it."""
        try:
            status = os.lstat(self._path(key))
        except OSError:
            return Inspected(Found.MISSING)
        found = Found.MISSING if error.errno in _NO_FILES_LEFT else Found.DAMAGED
        return Inspected(found, status.st_ino, written_ns=status.st_mtime_ns)

    def _content(self, fd: int, status: os.stat_result, key: bytes, parts: Parts | None) -> tuple[Found, bytes]:
        """Read header and, if asked for, bytes. Return what they are, and the tenant if the header is sound."""
        header = bytearray(_HEADER_BYTES)
        try:
            num_read = _read_into(fd, [memoryview(header), *(parts or ())])
        except OSError:  # a folder, or a bad place of the disk
            return Found.DAMAGED, b""
        fields = bytes(header[: _FIELDS.size])
        if num_read < _HEADER_BYTES or xxhash.xxh3_64_digest(fields) != header[_FIELDS.size :]:
            return Found.DAMAGED, b""
        magic, described, of_key, tenant, block_bytes, checksum = _FIELDS.unpack(fields)
        if (magic, described) != (_MAGIC, self.described):
            return Found.FOREIGN, tenant
        whole = stat.S_ISREG(status.st_mode) and status.st_size == self._whole_bytes
        if not whole or (of_key, block_bytes) != (key, self._block_bytes):
            return Found.DAMAGED, tenant
        if parts is not None and (num_read != self._whole_bytes or _checksum(key, tenant, parts) != checksum):
            return Found.DAMAGED, tenant
        return Found.WHOLE, tenant


def _make_folder(path: str) -> None:
    """Make a folder of a tier, or find it there. Raises FileNotFoundError where the tier is gone: `open_folder` makes that."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _checksum(key: bytes, tenant: bytes, parts: Parts) -> bytes:
    checksum = xxhash.xxh3_128(key + tenant)
    for part in parts:
        checksum.update(part)
    digest: bytes = checksum.digest()
    return digest


def _write_whole(fd: int, slices: Sequence[bytes | memoryview]) -> None:
    """Write slices one after the other. Raises OSError; a write that falls short has met the end of the disk."""
    for start in range(0, len(slices), _MAX_SLICES):
        some = slices[start : start + _MAX_SLICES]
        if os.writev(fd, some) != sum(memoryview(each).nbytes for each in some):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_into(fd: int, slices: Parts) -> int:
    """Fill slices one after the other, as far as the file goes. Returns the number of bytes. Raises OSError."""
    num_read = 0
    for start in range(0, len(slices), _MAX_SLICES):
        num_read += os.preadv(fd, slices[start : start + _MAX_SLICES], num_read)
    return num_read
