"""Models on the Hugging Face hub, through `huggingface_hub` and its cache.

A snapshot that lies in the cache whole is used without asking the hub, so that a worker restarts without the network and
all workers of a machine see the same files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.fields import model_error
from configs.model_files.hf_directory import CONFIG, GENERATION_CONFIG, weight_files_of
from configs.model_files.hf_tokenizer import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from protocol.errors import ConfigError, UnavailableError, first_line

_NEEDED = [CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE]
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]


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
    import httpx  # these two take 0.3 s together, which only hub models pay
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = [*_NEEDED, *_WEIGHTS]
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=patterns, local_files_only=True))
        if _is_whole(folder):
            return folder
    except HFValidationError:
        raise model_error(f"{repo_id} is no directory and can't be the id of a model on the Hugging Face hub") from None
    except LocalEntryNotFoundError:
        pass
    failed = f"can't fetch {repo_id} from the Hugging Face hub, and no directory has this name"
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except GatedRepoError:
        reason = "it is gated: accept its terms on the hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private: check the name and HF_TOKEN"
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            raise model_error(f"{failed}: the cache doesn't have it whole, and HF_HUB_OFFLINE is set") from None
        reason = "the hub can't be reached and the cache doesn't have it whole: check the network"
        raise UnavailableError(f"{failed}: {reason}", param="model") from None
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        is_busy = isinstance(error, HfHubHTTPError) and (error.response.is_server_error or error.response.status_code == 429)
        if is_busy or isinstance(error, httpx.TransportError):
            raise UnavailableError(f"{failed}: {reason}", param="model") from None
    raise model_error(f"{failed}: {reason}")


def _is_whole(folder: Path) -> bool:
    if not (folder / CONFIG).exists() or not (folder / TOKENIZER).exists():
        return False
    try:
        weight_files_of(folder)
    except ConfigError:
        return False
    return True


def local_snapshots() -> list[Snapshot]:
    """Return the newest snapshot of every model in the hub's cache, sorted by name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos  # by default a copy of it, as it was at the first import
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if repo.repo_type == "model" and newest is not None:
            found.append(Snapshot(repo.repo_id, newest.snapshot_path, repo.size_on_disk))
    return sorted(found, key=lambda snapshot: snapshot.repo_id)
