"""What a Hugging Face directory says about its tokenizer: tokenizer.json, tokenizer_config.json, chat_template.jinja.

A byte-level BPE is recognised by everything that tokenizer.json configures and turned into a ByteLevelBpe; the rest is
left to the `tokenizers` package, which reads the same file. When in doubt it is left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.facts import ByteLevelBpe, TokenizerFacts
from configs.fields import Fields, model_error, read_json
from configs.model_files.bpe_patterns import GPT2, GPT2_SINGLE_DIGITS, SPLIT_PATTERNS

TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_BPE_DEFAULTS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("type", ("BPE",)),
    ("dropout", (None, 0.0)),
    ("unk_token", (None,)),
    ("continuing_subword_prefix", (None, "")),
    ("end_of_word_suffix", (None, "")),
    ("byte_fallback", (None, False)),
)
"""Settings of the BPE model, and their values that leave plain byte-level BPE."""
_MOST_IDS = 2**24
"""Ids of a vocabulary are below this: each has a place in a list, whether or not there is a token."""


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Return the tokenizer of a Hugging Face directory.

    Raises ConfigError for files that are missing or damaged and for prompt decorations that Tandem doesn't make."""
    path = folder / TOKENIZER
    if not path.exists():
        makes_it = "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise model_error(f"{path}: no such file; `{makes_it}` of transformers makes it of a tokenizer.model")
    tokenizer = read_json(path)
    config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else Fields(TOKENIZER_CONFIG, {})
    added = _added_tokens(tokenizer)
    eos_token = _named_token(config, "eos_token")
    first_token = _first_token(tokenizer, eos_token)
    bos_token = _named_token(config, "bos_token") or first_token
    bpe = _byte_level_bpe(tokenizer, added)
    if bpe is None:
        _check_readable(path)
    return TokenizerFacts(
        byte_level_bpe=bpe,
        tokenizer_json=path if bpe is None else None,
        chat_template=_chat_template(folder, config),
        special_tokens={token["content"]: token["id"] for token in added if token.get("special")},
        user_tokens={token["content"]: token["id"] for token in added if not token.get("special")},
        bos_token=bos_token,
        eos_token=eos_token,
        unk_token=_named_token(config, "unk_token"),
        prompt_bos=_prompt_bos(config, bos_token, first_token),
    )


def _check_readable(path: Path) -> None:
    from tokenizers import Tokenizer  # 30 ms that byte-level models save

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the package raises nothing more specific
        raise model_error(f"{path}: the tokenizers package can't read it: {str(error)[:200]}") from None


def _added_tokens(tokenizer: Fields) -> list[dict[str, Any]]:
    added = tokenizer.raw("added_tokens") or []
    for token in added if isinstance(added, list) else [None]:
        match token:
            case {"id": int(token_id), "content": str(content)} if token_id >= 0 and content:
                pass
            case _:
                raise tokenizer.wrong("added_tokens", "a list of objects with id and content")
    return list(added)


def _named_token(config: Fields, key: str) -> str | None:
    """A token such as bos_token: a string, or an object with the string as `content`."""
    value = config.raw(key)
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise config.wrong(key, "a string or an object with content")
    return content


def _chat_template(folder: Path, config: Fields) -> str | None:
    path = folder / CHAT_TEMPLATE
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise model_error(f"{path}: can't be read as UTF-8 text") from None
    template = config.raw("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise config.wrong("chat_template", "a string or a list with an entry named default")
    return template


def _prompt_bos(config: Fields, bos_token: str | None, first_token: str | None) -> str | None:
    """As `transformers` does: the post-processor's token, whichever it is, unless tokenizer_config.json tells about BOS.

    `add_eos_token`, which many fine-tunes keep from their training, is not heeded: a prompt is to go on.
    """
    if "add_bos_token" not in config:
        return first_token
    return bos_token if config.flag("add_bos_token") else None


def _first_token(tokenizer: Fields, eos_token: str | None) -> str | None:
    """The token that the post-processor puts before a prompt. EOS after the prompt is not heeded, anything else is refused."""
    step = tokenizer.raw("post_processor")
    steps = step.get("processors") or [] if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    first: str | None = None
    for processor in steps:
        match processor:
            case None | {"type": "ByteLevel"}:
                pass
            case {"type": "TemplateProcessing", "single": [{"Sequence": _}, *end]} if _is_eos(end, eos_token):
                pass
            case {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": str(token)}}, {"Sequence": _}, *end],
            } if _is_eos(end, eos_token):
                first = token
            case _:
                raise tokenizer.wrong("post_processor", "one that adds at most one token before the prompt, and EOS after it")
    return first


def _is_eos(end: list[Any], eos_token: str | None) -> bool:
    """Whether what a post-processor puts after a prompt is EOS, or nothing."""
    match end:
        case []:
            return True
        case [{"SpecialToken": {"id": str(token)}}]:
            return token == eos_token
        case _:
            return False


def _byte_level_bpe(tokenizer: Fields, added: list[dict[str, Any]]) -> ByteLevelBpe | None:
    """The tokenizer as a byte-level BPE; None if anything about it is different."""
    model = tokenizer.section("model")
    pattern = _pattern(tokenizer.raw("pre_tokenizer"))
    nfc = _is_nfc(tokenizer.raw("normalizer"))
    decoder = tokenizer.raw("decoder")
    plain = all(model.raw(key) in allowed for key, allowed in _BPE_DEFAULTS)
    found_whole = not any(token.get(key) for token in added for key in ("single_word", "lstrip", "rstrip", "normalized"))
    if pattern is None or nfc is None or not plain or not found_whole:
        return None
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        return None
    vocabulary = model.raw("vocab")
    if not isinstance(vocabulary, dict) or not all(type(token_id) is int and token_id >= 0 for token_id in vocabulary.values()):
        raise tokenizer.wrong("model", "a BPE model whose vocab is an object from token to id")
    ids = vocabulary | {token["content"]: token["id"] for token in added}
    if max(ids.values(), default=0) >= _MOST_IDS:
        raise model_error(f"{tokenizer.source}: an id is too large: they have to be below {_MOST_IDS}")
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    return ByteLevelBpe(
        tokens=tuple(tokens),
        merges=_merges(model),
        pattern=pattern,
        ignore_merges=model.flag("ignore_merges", False),
        nfc=nfc,
    )


def _merges(model: Fields) -> tuple[str, ...]:
    """Written as `left right` by older and as [left, right] by newer versions of `tokenizers`."""
    merges = model.raw("merges")
    if not isinstance(merges, list):
        raise model.wrong("merges", "a list of pairs")
    joined = []
    for merge in merges:
        match merge:
            case str():
                joined.append(merge)
            case [str(left), str(right)]:
                joined.append(f"{left} {right}")
            case _:
                raise model.wrong("merges", "a list of pairs")
    return tuple(joined)


def _is_nfc(normalizer: Any) -> bool | None:
    """Whether text is normalised to NFC first; None if something else happens to it."""
    match normalizer:
        case None | {"type": "Sequence", "normalizers": []}:
            return False
        case {"type": "NFC"}:
            return True
        case _:
            return None


def _pattern(pre_tokenizer: Any) -> str | None:
    """The pattern, in tiktoken's dialect, that splits text as this pre-tokenizer does; None if there is none."""
    steps = pre_tokenizer.get("pretokenizers") if isinstance(pre_tokenizer, dict) else None
    match steps if steps is not None else [pre_tokenizer]:
        case [{"type": "ByteLevel", "add_prefix_space": False, **rest}] if rest.get("use_regex", True):
            return GPT2
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, **rest},
        ] if rest.get("use_regex", True):
            return GPT2_SINGLE_DIGITS
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if regex in SPLIT_PATTERNS:
            return regex
        case _:
            return None
