from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.facts import TokenizerFacts
from configs.model_files.bpe_patterns import GPT2, GPT2_SINGLE_DIGITS, LLAMA3, QWEN2
from configs.model_files.hf_tokenizer import read_tokenizer
from protocol.errors import ConfigError

Json = dict[str, Any]
Read = Callable[..., TokenizerFacts]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MERELY_BYTES = BYTE_LEVEL | {"use_regex": False}
BOS_FIRST: Json = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
EOS = {"SpecialToken": {"id": "</s>", "type_id": 0}}
EOS_LAST = BOS_FIRST | {"single": [{"Sequence": {"id": "A", "type_id": 0}}, EOS]}
BOTH = BOS_FIRST | {"single": [*BOS_FIRST["single"], EOS]}


def split(regex: str) -> Json:
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, MERELY_BYTES]}


@pytest.fixture
def read(tmp_path: Path, hf_tokenizer: Json) -> Read:
    """Read a directory's tokenizer; keyword arguments replace keys of tokenizer.json."""

    def run(config: Json | None = None, **changes: Any) -> TokenizerFacts:
        (tmp_path / "tokenizer.json").write_text(json.dumps(hf_tokenizer | changes))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return read_tokenizer(tmp_path)

    return run


def test_byte_level_bpe(read: Read) -> None:
    facts = read({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None})
    assert facts.byte_level_bpe is not None
    assert facts.tokenizer_json is None
    assert facts.byte_level_bpe.merges == ("h e", "l l", "he ll")
    assert facts.byte_level_bpe.tokens[0] == "<s>"
    assert facts.byte_level_bpe.tokens[-1] == "hell"
    assert (facts.bos_token, facts.eos_token, facts.unk_token) == ("<s>", "</s>", None)
    assert facts.special_tokens == {"<s>": 0, "</s>": 1}
    assert facts.prompt_bos is None


def test_merges_as_older_versions_write_them(read: Read, hf_tokenizer: Json) -> None:
    facts = read(model=hf_tokenizer["model"] | {"merges": ["h e", "l l", "he ll"]})
    assert facts.byte_level_bpe is not None
    assert facts.byte_level_bpe.merges == ("h e", "l l", "he ll")


@pytest.mark.parametrize(
    ("pre_tokenizer", "pattern"),
    [
        (BYTE_LEVEL, GPT2),
        ({"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}, GPT2),
        (
            {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
            GPT2_SINGLE_DIGITS,
        ),
        (split(LLAMA3), LLAMA3),
        (split(QWEN2), QWEN2),
    ],
)
def test_pre_tokenizers_that_are_known(read: Read, pre_tokenizer: Json, pattern: str) -> None:
    bpe = read(pre_tokenizer=pre_tokenizer).byte_level_bpe
    assert bpe is not None
    assert bpe.pattern == pattern


def test_normalizers(read: Read) -> None:
    plain, nfc = read().byte_level_bpe, read(normalizer={"type": "NFC"}).byte_level_bpe
    assert plain is not None
    assert nfc is not None
    assert (plain.nfc, nfc.nfc) == (False, True)


def test_a_gap_in_the_ids_is_an_empty_token(read: Read, hf_tokenizer: Json) -> None:
    vocabulary = hf_tokenizer["model"]["vocab"] | {"hell": 300}
    bpe = read(model=hf_tokenizer["model"] | {"vocab": vocabulary}).byte_level_bpe
    assert bpe is not None
    assert len(bpe.tokens) == 301
    assert bpe.tokens[280] == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
        {"pre_tokenizer": MERELY_BYTES},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, BYTE_LEVEL]}},
        {"pre_tokenizer": split(r"\p{L}+")},
        {"normalizer": {"type": "Lowercase"}},
        {"decoder": None},
        {"decoder": {"type": "Fuse"}},
        {"model": {"unk_token": "<s>"}},
        {"model": {"dropout": 0.1}},
        {"model": {"byte_fallback": True}},
        {"model": {"end_of_word_suffix": "</w>"}},
        {"added_tokens": {"lstrip": True}},
        {"added_tokens": {"normalized": True}},
        {"added_tokens": {"single_word": True}},
    ],
)
def test_whatever_else_is_left_to_the_tokenizers_package(
    read: Read, hf_tokenizer: Json, tmp_path: Path, changes: dict[str, Any]
) -> None:
    if "model" in changes:
        changes = {"model": hf_tokenizer["model"] | changes["model"]}
    if "added_tokens" in changes:
        changes = {"added_tokens": [token | changes["added_tokens"] for token in hf_tokenizer["added_tokens"]]}
    facts = read(**changes)
    assert facts.byte_level_bpe is None
    assert facts.tokenizer_json == tmp_path / "tokenizer.json"
    assert facts.special_tokens == {"<s>": 0, "</s>": 1}


def test_tokens_that_are_found_whole_and_shown(read: Read, hf_tokenizer: Json) -> None:
    think = hf_tokenizer["added_tokens"][0] | {"id": 261, "content": "<think>", "special": False}
    facts = read(added_tokens=[*hf_tokenizer["added_tokens"], think])
    assert facts.user_tokens == {"<think>": 261}
    assert facts.byte_level_bpe is not None
    assert facts.byte_level_bpe.tokens[261] == "<think>"


@pytest.mark.parametrize(
    ("config", "post_processor", "bos_token", "prompt_bos"),
    [
        ({}, BOS_FIRST, "<s>", "<s>"),
        ({"bos_token": "<s>"}, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, BOS_FIRST]}, "<s>", "<s>"),
        ({"bos_token": "<s>", "add_bos_token": False}, BOS_FIRST, "<s>", None),
        ({"bos_token": "<s>", "add_bos_token": True}, None, "<s>", "<s>"),
        ({"bos_token": None, "add_bos_token": True}, None, None, None),
        ({"bos_token": "</s>"}, None, "</s>", None),
        ({"bos_token": "</s>"}, BOS_FIRST, "</s>", "<s>"),
        ({"bos_token": "</s>", "add_bos_token": True}, BOS_FIRST, "</s>", "</s>"),
        ({}, {"type": "ByteLevel"}, None, None),
        ({"eos_token": "</s>", "add_eos_token": True}, BOTH, "<s>", "<s>"),
        ({"eos_token": "</s>"}, EOS_LAST, None, None),
    ],
)
def test_bos(read: Read, config: Json, post_processor: Json | None, bos_token: str | None, prompt_bos: str | None) -> None:
    facts = read(config, post_processor=post_processor)
    assert (facts.bos_token, facts.prompt_bos) == (bos_token, prompt_bos)


def test_chat_templates(read: Read, tmp_path: Path) -> None:
    assert read().chat_template is None
    assert read({"chat_template": "plain"}).chat_template == "plain"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert read({"chat_template": named}).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert read({"chat_template": "plain"}).chat_template == "from the file"


def test_a_folder_of_sentencepiece_says_how_to_convert_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file; `AutoTokenizer\.from_pretrained.*save_pretrained"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        ({"eos_token": "<s>"}, {"post_processor": EOS_LAST}, "should be one that adds at most one token before the prompt"),
        ({"eos_token": "</s>"}, {"post_processor": BOTH | {"single": [*BOTH["single"], EOS]}}, "post_processor should be one"),
        ({}, {"post_processor": {"type": "BertProcessing"}}, "post_processor should be"),
        ({}, {"added_tokens": [{"id": "x"}]}, "added_tokens should be a list of objects with id and content"),
        ({}, {"added_tokens": 3}, "added_tokens should be"),
        ({}, {"model": {"merges": [["a"]]}}, "merges should be a list of pairs"),
        ({}, {"model": {"vocab": []}}, "vocab is an object"),
        ({}, {"model": {"vocab": {"a": 2**24}}}, "an id is too large: they have to be below 16777216"),
        ({}, {"added_tokens": [{"id": 10**30, "content": "x"}]}, "an id is too large"),
        ({}, {"model": {"type": "WordPiece"}}, "the tokenizers package can't read it"),
        ({"bos_token": 3}, {}, "bos_token should be a string"),
        ({"chat_template": 3}, {}, "chat_template should be a string"),
        ({"add_bos_token": "yes"}, {}, "add_bos_token should be true or false"),
    ],
)
def test_damaged_files(read: Read, hf_tokenizer: Json, config: Json, changes: dict[str, Any], says: str) -> None:
    if "model" in changes:
        changes = {"model": hf_tokenizer["model"] | changes["model"]}
    with pytest.raises(ConfigError) as caught:
        read(config, **changes)
    assert says in caught.value.message
    assert "\n" not in caught.value.message
