"""Models on the Hugging Face hub, through `huggingface_hub` and its cache.

A snapshot that lies in the cache whole is used without asking the hub, so that a worker restarts without the network and
all workers of a machine see the same files. The hub is asked for a tokenizer_config.json that is not there: another program may
have fetched the rest alone, and chats need the template in it. Without an answer what is there is served.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from configs.fields import model_error
from configs.model_files.hf_directory import CONFIG, weight_files_of
from configs.model_files.hf_tokenizer import TOKENIZER, TOKENIZER_CONFIG
from configs.model_files.hub_download import PATTERNS, download_apart
from protocol.errors import ConfigError, TandemError


@dataclass(frozen=True)
class Snapshot:
    """A model of the hub that lies in the cache of `huggingface_hub`."""

    repo_id: str
    path: Path
    num_bytes: int


def fetch_snapshot(repo_id: str) -> Path:
    """Return the directory of a model from the hub, downloaded if need be.

    Raises ConfigError if it can't be had, UnavailableError while the hub doesn't answer.
    """
    here = whole_snapshot(repo_id)
    if here is not None and os.path.exists(here / TOKENIZER_CONFIG):
        return here
    try:
        folder = download_apart(repo_id)
    except TandemError:
        if here is None:
            raise
        return here
    if not (folder / CONFIG).exists():
        raise model_error(
            f"{repo_id} has no {CONFIG} on the Hugging Face hub: only repositories of safetensors are fetched by id; "
            "download a .gguf file and give its path"
        )
    return folder


def whole_snapshot(repo_id: str) -> Path | None:
    """Return the directory of a model that lies in the cache whole; None if it has to be downloaded.

    Raises ConfigError for what can't be an id.
    """
    from huggingface_hub import snapshot_download  # takes 0.3 s, which only hub models pay
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=list(PATTERNS), local_files_only=True))
    except HFValidationError:
        raise model_error(f"{repo_id} is no directory and can't be the id of a model on the Hugging Face hub") from None
    except LocalEntryNotFoundError:
        return None
    return folder if _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    if not os.path.exists(folder / CONFIG) or not os.path.exists(folder / TOKENIZER):  # Path's own raises for EACCES
        return False
    try:
        weight_files_of(folder)
    except ConfigError:
        return False
    return True


def local_snapshots() -> list[Snapshot]:
    """Return every model that lies in the hub's cache whole, sorted by name; none of a cache that can't be read."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos  # by default a copy of it, as it was at the first import
    except (CacheNotFound, OSError):
        return []
    found = []
    for repo in repos:
        if repo.repo_type != "model":
            continue
        with suppress(ConfigError):  # other programs have names of their own
            if (folder := whole_snapshot(repo.repo_id)) is not None:
                found.append(Snapshot(repo.repo_id, folder, repo.size_on_disk))
    return sorted(found, key=lambda snapshot: snapshot.repo_id)
