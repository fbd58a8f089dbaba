"""Downloads a model from the Hugging Face hub in a process of its own, which can be ended at any moment.

`huggingface_hub` waits for every file that is under way when it is interrupted, which takes as long as a file of weights does.
A process is killed instead, and what it has downloaded counts at the next try. It ends with the process that started it, too.

    download_apart(id) ──► python -m configs.model_files.hub_download ID ──► one line of JSON: a folder, or what went wrong
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from configs.fields import model_error
from configs.model_files.hf_directory import CONFIG, GENERATION_CONFIG
from configs.model_files.hf_tokenizer import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from protocol.errors import TandemError, UnavailableError, first_line

PATTERNS = (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    "model*.safetensors",
    "model.safetensors.index.json",
)
"""The files of a repository that are needed, as its client takes them."""

_COMMAND = (sys.executable, "-P", "-m", "configs.model_files.hub_download")
_DEADLINE_S = 86_400.0
"""For a whole model; what hangs is given up long before, by the client's own deadlines."""


def download_apart(repo_id: str) -> Path:
    """Return the directory of a model, after downloading what its cache lacks.

    Progress goes to stderr. Raises ConfigError if it can't be had, UnavailableError while the hub doesn't answer.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    reader, writer = os.pipe()  # the other process reads to its end, which comes when this process ends
    try:
        done = subprocess.run(
            [*_COMMAND, repo_id],
            check=False,
            stdin=reader,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            timeout=_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"fetching {repo_id} took longer than {_DEADLINE_S:.0f} s", param="model") from None
    finally:
        os.close(reader)
        os.close(writer)
    if done.returncode != 0:
        raise UnavailableError(f"the process that fetched {repo_id} has ended with {done.returncode}", param="model")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "path" in answer:
        return Path(answer["path"])
    raise UnavailableError(answer["away"], param="model") if "away" in answer else model_error(answer["wrong"])


def download(repo_id: str) -> Path:
    """Download what the cache lacks of a model in this process, and return the model's directory.

    Raises ConfigError if it can't be had, UnavailableError while the hub doesn't answer.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        import httpx2 as hub_http  # what huggingface_hub sends its requests with; older versions take httpx
    except ImportError:
        import httpx as hub_http  # type: ignore[no-redef]

    failed = f"can't fetch {repo_id} from the Hugging Face hub, and no directory has this name"
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(PATTERNS)))
    except GatedRepoError:
        reason = "it is gated: accept its terms on the hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private: check the name and HF_TOKEN"
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            raise model_error(f"{failed}: the cache doesn't have it whole, and HF_HUB_OFFLINE is set") from None
        reason = "the hub can't be reached and the cache doesn't have it whole: check the network"
        raise UnavailableError(f"{failed}: {reason}", param="model") from None
    # hf_xet has RuntimeErrors alone. Settings of proxies that the client can't use are ValueErrors and ImportErrors.
    except (HfHubHTTPError, hub_http.HTTPError, OSError, RuntimeError, ValueError, ImportError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        is_busy = isinstance(error, HfHubHTTPError) and (error.response.is_server_error or error.response.status_code == 429)
        if is_busy or isinstance(error, (hub_http.TransportError, ConnectionError, TimeoutError, RuntimeError)):
            raise UnavailableError(f"{failed}: {reason}", param="model") from None
    raise model_error(f"{failed}: {reason}")


def _end_with_parent() -> None:
    while os.read(0, 1):  # sys.stdin has a lock, which a thread that waits in it keeps when Python ends
        pass
    os._exit(1)


def main() -> None:
    """Download the model that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in a terminal goes to all its processes: this one has nothing to say
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = {"path": str(download(sys.argv[1]))}
    except TandemError as error:
        answer = {"away" if isinstance(error, UnavailableError) else "wrong": error.message}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
