"""From the name of a model to its facts: what `--model` accepts and what `tandem models` lists.

A name is, in this order: a model that Tandem knows (`smollm2`), a GGUF file, a directory with a config.json, or the id of
a repository on the Hugging Face hub.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from configs.cache import file_sha256
from configs.facts import Model, ModelFacts, TokenizerFacts, WeightFormat
from configs.fields import model_error, read_json
from configs.model_files.gguf_model import model_from_gguf
from configs.model_files.hf_directory import CONFIG, checked_architecture, directory_hash, model_from_directory
from configs.model_files.hf_hub import fetch_snapshot, local_snapshots, whole_snapshot
from configs.model_files.packaged import SMOLLM2, fetch
from configs.model_files.rope import overrides_scaling, with_overrides
from configs.model_files.vocabulary import token_bytes
from configs.paced.profile import load_paced_profile
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, UnavailableError

_PACKAGED = {"smollm2": SMOLLM2}
_DRAFT = "speculative_config.model"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class ListedModel:
    """A model that can be named without giving a path."""

    name: str
    source: str
    """Where the model comes from, in words for people."""
    path: Path | None
    """Where the model lies on this machine; None if it has to be fetched first."""
    num_bytes: int
    """Bytes of the model on disk, or bytes that would be fetched."""


def resolve(name: str, served_model_name: str | None = None, scaling_overridden: bool = False) -> Model:
    """Return the model of this name, fetched if need be, with every file checked for being whole.

    Clients call it `served_model_name`; by default the name itself or, for a path, its last part without `.gguf`.
    The scaling of its positions may be any where the operator's is going to replace it (`scaling_overridden`).
    Fetching and hashing show progress on stderr when that is a terminal: call this before opening a live display.
    Raises ConfigError (param `model`) if there is no such model or Tandem can't serve it, UnavailableError if it has to be
    fetched and can't be now.
    """
    if name in _PACKAGED:
        return model_from_gguf(fetch(_PACKAGED[name]), served_model_name or name)
    path = Path(os.path.expanduser(name))  # Path's own raises for `~` of no user
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
        has_config = is_folder and (path / CONFIG).is_file()
    except OSError as error:
        raise model_error(f"model {name!r:.200} can't be looked up: {error.strerror}") from None
    if is_folder:
        if not has_config:
            raise model_error(f"{path}: the directory has no {CONFIG}{_gguf_hint(path)}")
        return model_from_directory(path.absolute(), served_model_name or path.absolute().name, scaling_overridden)
    if is_file:
        return model_from_gguf(path.absolute(), served_model_name or path.name.removesuffix(".gguf"), scaling_overridden)
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
        raise model_error(f"{path}: no such file or directory")
    if _HUB_ID.fullmatch(name):
        return model_from_directory(fetch_snapshot(name), served_model_name or name, scaling_overridden)
    close = difflib.get_close_matches(name, _PACKAGED, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    known = ", ".join(_PACKAGED)
    raise model_error(f"no model {name!r:.200}: give {known}, a GGUF file, a model directory or a hub id (org/name){hint}")


def _gguf_hint(folder: Path) -> str:
    """What to give instead of a folder of GGUF files."""
    found = sorted(folder.glob("*.gguf"))
    return f"; give the path of a GGUF file in it, such as {found[0]}" if found else ""


def resolve_for(config: ClusterConfig) -> Model:
    """Return the model that a cluster serves, under its configured name. Raises ConfigError if it can't be served,
    UnavailableError if it can't be fetched now.

    Paced workers need its tokenizer alone; how long a context is says their profile.
    """
    model = resolve(config.model, config.served_model_name, overrides_scaling(config.hf_overrides))
    model = replace(model, facts=with_overrides(model.facts, config.hf_overrides, config.max_model_len))
    if config.engine == "paced":
        context_tokens = load_paced_profile(config.paced_profile).context_tokens
        return replace(model, facts=replace(model.facts, max_model_len=context_tokens))
    return model


def is_unchanged(facts: ModelFacts) -> bool:
    """Return whether a model's files still are those that its hash is of. What has not been touched is not read again."""
    files = facts.weight_files
    try:
        now = file_sha256(files[0]) if facts.weight_format is WeightFormat.GGUF else directory_hash(files)
    except ConfigError:
        return False
    return now == facts.model_hash


def draft_facts(config: ClusterConfig) -> ModelFacts | None:
    """Return the facts of the draft model, with the context up to which it is asked; None where no model drafts.

    Raises ConfigError (param `speculative_config.model`) if there is no such model.
    """
    draft = _draft(config)
    return None if draft is None else draft.facts


def check_draft(config: ClusterConfig, model: Model) -> None:
    """Raise ConfigError if a draft model is configured that can't guess tokens of `model`: its vocabulary is another."""
    draft = _draft(config)
    if draft is None:
        return
    if _tokens(draft.tokenizer) != _tokens(model.tokenizer):
        problem = f"the vocabulary of {draft.facts.name} is not that of {model.facts.name}: a draft model has to share it"
        raise ConfigError(f"{_DRAFT}: {problem}", param=_DRAFT)


def _draft(config: ClusterConfig) -> Model | None:
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return None
    try:
        model = resolve(speculative.model)
    except (ConfigError, UnavailableError) as error:
        raise type(error)(f"{_DRAFT}: {error.message}", param=_DRAFT) from None
    facts = with_overrides(model.facts, {}, speculative.max_model_len)
    context = min(facts.max_model_len, speculative.max_model_len or facts.max_model_len)
    return replace(model, facts=replace(facts, max_model_len=context))


def _tokens(facts: TokenizerFacts) -> list[bytes]:
    """The bytes of every token, by id, without ids at the end that stand for nothing."""
    tokens = token_bytes(facts)
    while tokens and not tokens[-1]:
        tokens.pop()
    return tokens


def is_here(name: str) -> bool:
    """Return whether `resolve` would find a model of this name without fetching anything."""
    if name in _PACKAGED:
        return os.path.exists(_PACKAGED[name].path)
    if os.path.exists(os.path.expanduser(name)):
        return True
    try:
        return _HUB_ID.fullmatch(name) is not None and whole_snapshot(name) is not None
    except ConfigError:
        return False


def context_before_fetch(config: ClusterConfig) -> int | None:
    """Return the context, in tokens, of a configuration's model that is not here; None if only its files tell it."""
    packaged = None if config.hf_overrides else _PACKAGED.get(config.model)
    return None if packaged is None else packaged.context_tokens


def all_here(config: ClusterConfig) -> bool:
    """Return whether `resolve_for` and `draft_facts` would find the models of a configuration without fetching anything."""
    speculative = config.speculative_config
    draft = None if speculative is None else speculative.model
    return is_here(config.model) and (draft is None or is_here(draft))


def list_models() -> list[ListedModel]:
    """List the models that Tandem knows by name, then those in the Hugging Face cache that it can serve."""
    found = []
    for name, model in _PACKAGED.items():
        path = model.path if os.path.exists(model.path) else None
        num_bytes = path.stat().st_size if path is not None else model.wheel_bytes
        found.append(
            ListedModel(name=name, source=f"PyPI: {model.distribution} {model.version}", path=path, num_bytes=num_bytes)
        )
    for snapshot in local_snapshots():
        try:
            checked_architecture(read_json(snapshot.path / CONFIG))
        except ConfigError:
            continue  # the cache is shared with other programs: what is no model of ours is not listed
        found.append(
            ListedModel(name=snapshot.repo_id, source="Hugging Face hub", path=snapshot.path, num_bytes=snapshot.num_bytes)
        )
    return found
