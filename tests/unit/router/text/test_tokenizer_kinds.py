"""Tokenizers of other models: small ones, trained here, read from their tokenizer.json, against `tokenizers` itself."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

import configs
from configs.facts import TokenizerFacts
from configs.model_files.bpe_patterns import LLAMA3, QWEN2
from configs.model_files.hf_tokenizer import read_tokenizer
from configs.model_files.vocabulary import token_bytes
from protocol.errors import ConfigError
from router.request.answer import TokenTexts
from router.text.renamed_tokens import RenamedControlTokens
from router.text.tokenizer import Tokenizer
from router.text.traced import Traced, ours
from tests.unit.router.api.test_http_large_bodies import watched_loop

VariedStrings = Callable[[int], list[str]]
PRE_TOKENIZERS: dict[str, list[Any]] = {
    "gpt2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "llama3": [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


@pytest.fixture(scope="module")
def corpus(varied_strings: VariedStrings) -> list[str]:
    sources = [path.read_text() for path in sorted(Path(configs.__file__).parent.rglob("*.py"))]
    return [*sources, *varied_strings(400)]


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def trained(request: pytest.FixtureRequest, corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer.json whose ids are in no order."""
    kind = request.param
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[kind])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<bos>"]
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<thinking>", normalized=False)])
    if kind == "llama3":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    saved = json.loads(tokenizer.to_str())
    vocabulary = saved["model"]["vocab"]
    ordinary = [token for token in vocabulary if token != "<bos>"]
    shuffled = [vocabulary[token] for token in ordinary]
    random.Random(7).shuffle(shuffled)
    vocabulary.update(zip(ordinary, shuffled, strict=True))
    saved["model"]["ignore_merges"] = kind == "llama3"
    folder = tmp_path_factory.mktemp(kind)
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return folder


def test_byte_level_kinds_are_exact(trained: Path, varied_strings: VariedStrings) -> None:
    facts = read_tokenizer(trained)
    assert facts.byte_level_bpe is not None
    ours, theirs = Tokenizer.build(facts), tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json"))
    strings = [*varied_strings(700), "a<think>b<thinking>c<bos>", "e\u0301 ﬁ Å", "DON'T '\u017f IT'LL 12345"]
    for text in strings:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
        assert ours.encode(text, add_bos=True) == theirs.encode(text).ids


def test_control_tokens_of_clients_are_text_in_byte_level_kinds(trained: Path, varied_strings: VariedStrings) -> None:
    tokenizer = Tokenizer.build(read_tokenizer(trained))
    bos = tokenizer.encode("<bos>")
    for text in varied_strings(150):
        assert tokenizer.encode_traced(ours("<bos>") + Traced(text) + "<think>\n") == tokenizer.encode(f"<bos>{text}<think>\n")
    forged = tokenizer.encode_traced(ours("<bos>") + Traced("a<bos><think>b"))
    assert forged[:1] == bos
    assert bos[0] not in forged[1:]
    assert tokenizer.encode("<think>")[0] in forged, "not a control token"
    assert tokenizer.decode(forged, skip_special=False) == "<bos>a<bos><think>b"


@pytest.fixture(scope="module")
def sentencepiece_like(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> TokenizerFacts:
    """Llama 2's kind: words with U+2581, and bytes where a character has no token."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, limit_alphabet=150, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens]
    )
    tokenizer.train_from_iterator(corpus, trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in byte_tokens]
    saved["post_processor"] = json.loads(
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]).__getstate__()
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return read_tokenizer(folder)


@pytest.fixture(scope="module")
def other_kind(sentencepiece_like: TokenizerFacts) -> Tokenizer:
    return Tokenizer.build(sentencepiece_like)


def test_the_bytes_of_tokens_are_those_of_the_text(other_kind: Tokenizer, varied_strings: VariedStrings) -> None:
    """Blanks in front of words, too, and parts of characters."""
    texts = TokenTexts(other_kind)
    for text in ["a word", "é😀 ", *varied_strings(100)]:
        ids = other_kind.encode(text)
        said = b"".join(bytes(texts.find(token_id).utf8) for token_id in ids).decode()
        assert said.removeprefix(" ") == other_kind.decode(ids, skip_special=False)


@pytest.mark.parametrize("forged", ["", "<s>"], ids=["plain", "with a control token of the client's"])
def test_a_long_text_is_encoded_beside_the_loop(other_kind: Tokenizer, forged: str) -> None:
    """`tokenizers` holds the interpreter while it encodes a single text, but not in a batch."""
    text = Traced(forged + "hello world " * 20_000)
    other_kind.encode_traced(text[:100])  # what forged texts need is made once

    async def main() -> None:
        async with watched_loop() as pauses:
            await asyncio.sleep(0.002)
            ids = await asyncio.to_thread(other_kind.encode_traced, text)
            await asyncio.sleep(0.002)
        assert len(ids) > 20_000
        assert pauses[0] < 0.08

    asyncio.run(main())


def test_other_kinds_are_read_by_tokenizers(sentencepiece_like: TokenizerFacts, varied_strings: VariedStrings) -> None:
    assert sentencepiece_like.byte_level_bpe is None
    ours = Tokenizer.build(sentencepiece_like)
    theirs = tokenizers.Tokenizer.from_file(str(sentencepiece_like.tokenizer_json))
    assert ours.vocab_size == theirs.get_vocab_size()
    for text in varied_strings(300):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.encode(text, add_bos=True) == [1, *ids]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode([-1, 10**6]) == ""


def test_control_tokens_of_clients_are_text_in_other_kinds(
    sentencepiece_like: TokenizerFacts, other_kind: Tokenizer, varied_strings: VariedStrings
) -> None:
    assert sentencepiece_like.tokenizer_json is not None
    renamed = RenamedControlTokens(sentencepiece_like.tokenizer_json, sentencepiece_like.special_tokens, None)
    for text in varied_strings(150):
        expected = other_kind.encode(f"<s>{text}</s> \n{text}")
        places = [(0, "<s>"), (3 + len(text), "</s>")]
        assert renamed.encode(f"<s>{text}</s> \n{text}", places) == expected, "all else is the tokenizer's own"
        assert other_kind.encode_traced(ours("<s>") + Traced(text) + "</s> \n" + Traced(text)) == expected
    for forged in ("</s>", "a</s><s>b<unk>", "</", "</s></s>"):
        token_ids = other_kind.encode_traced(ours("<s>") + Traced(forged) + "</s>")
        assert (token_ids[0], token_ids[-1]) == (1, 2)
        assert not {0, 1, 2} & set(token_ids[1:-1])
        assert other_kind.decode(token_ids).strip() == forged


def test_token_bytes_of_other_kinds(sentencepiece_like: TokenizerFacts) -> None:
    ours = Tokenizer.build(sentencepiece_like)
    ids = ours.encode("the \U00050000")
    assert b"".join(map(ours.token_bytes, ids)).decode() == " the \U00050000"
    assert ours.token_bytes(1) == b"<s>"
    assert ours.token_bytes(-1) == ours.token_bytes(10**6) == b""


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])])
def test_token_bytes_of_byte_level_kinds_that_tokenizers_reads(
    trained: Path, decoder: Any, varied_strings: VariedStrings, tmp_path: Path
) -> None:
    """Router and engine have the same ones, and together they are the text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json"))
    tokenizer.decoder = decoder
    tokenizer.normalizer = None
    tokenizer.add_tokens(["<tool>", "Ġa"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    facts = read_tokenizer(tmp_path)
    assert facts.byte_level_bpe is None
    ours = Tokenizer.build(facts)
    for text in [*varied_strings(200), "a b\n\té<tool><bos>😀", "x Ġa"]:
        assert b"".join(map(ours.token_bytes, ours.encode(text))).decode() == text
    assert token_bytes(facts) == [ours.token_bytes(token_id) for token_id in range(ours.vocab_size)]
    assert ours.token_bytes(ours.vocab_size) == b""


@given(text=st.text(alphabet="the ab中😀é\n\u0301", max_size=30), data=st.data())
def test_streams_of_other_kinds(other_kind: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = other_kind.encode(text)
    for _ in range(data.draw(st.integers(0, 3))):
        ids.insert(data.draw(st.integers(0, len(ids))), data.draw(st.sampled_from([1, 2, -1, 10**6])))
    stream = other_kind.detokenizer()
    pieces = [stream.push([token_id]) for token_id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == other_kind.decode(ids)


@given(data=st.data())
def test_streams_of_other_kinds_survive_anything(other_kind: Tokenizer, data: st.DataObject) -> None:
    """Byte tokens that are not UTF-8 included; all other text is there, in order."""
    ids = data.draw(st.lists(st.integers(-2, other_kind.vocab_size + 1), max_size=12))
    stream = other_kind.detokenizer()
    text = "".join(stream.push([token_id]) for token_id in ids) + stream.flush()
    byte_tokens = set(range(3, 259))
    if not byte_tokens & set(ids):
        assert text == other_kind.decode(ids)


@given(pieces=st.lists(st.sampled_from(["日".encode(), "é😀".encode(), b"\xff", b"\xe6", b"\x97", None]), max_size=6))
def test_characters_that_are_out_are_not_replaced_again(other_kind: Tokenizer, pieces: list[bytes | None]) -> None:
    """Behind a whole character of byte tokens, one byte of the next one came as four replacement characters."""
    word = other_kind.encode("the")
    ids: list[int] = []
    expected, waiting = "", b""
    for piece in pieces:
        if piece is None:
            ids += word
            expected, waiting = expected + "\ufffd" * len(waiting) + " the", b""
        for byte in piece or b"":
            ids.append(3 + byte)
            waiting += bytes([byte])
            if "\ufffd" not in waiting.decode(errors="replace"):
                expected, waiting = expected + waiting.decode(), b""
    stream = other_kind.detokenizer()
    text = "".join([stream.push([token_id]) for token_id in ids]) + stream.flush()
    assert text == (expected + "\ufffd" * len(waiting)).removeprefix(" ")


@pytest.mark.parametrize(
    ("data", "text"), [("😀😀".encode()[:5], "😀\ufffd"), ("日".encode() + b"\xff", "日\ufffd"), (b"\xff", "\ufffd")]
)
def test_one_byte_that_is_no_character_is_one_replacement(other_kind: Tokenizer, data: bytes, text: str) -> None:
    for end in ("", "the"):
        stream = other_kind.detokenizer()
        ids = [*(3 + byte for byte in data), *other_kind.encode(end)]
        assert "".join([stream.push([token_id]) for token_id in ids]) + stream.flush() == f"{text} {end}".rstrip()


@given(
    before=st.text(alphabet="the ab中😀é\n", min_size=1, max_size=12).filter(str.strip),
    text=st.text(alphabet="the ab中😀é\n\u0301", max_size=20),
    end=st.sampled_from([[], [2], [1, 2, 10**6]]),
)
def test_text_that_goes_on_keeps_its_first_blank(other_kind: Tokenizer, before: str, text: str, end: list[int]) -> None:
    whole = other_kind.encode(before + " " + text)
    for cut in range(1, len(whole)):
        begun, ids = whole[:cut] + end, whole[cut:]
        prompt = other_kind.decode(begun)
        if "\ufffd" in prompt:
            continue
        stream, at_once = other_kind.detokenizer(begun), other_kind.detokenizer(begun)
        said = "".join(stream.push([token_id]) for token_id in ids) + stream.flush()
        assert prompt + said == other_kind.decode(whole)
        assert at_once.push(ids) + at_once.flush() == said


def test_half_a_character_before_is_no_part_of_what_goes_on(other_kind: Tokenizer) -> None:
    half = [3 + byte for byte in "😀".encode()]
    stream = other_kind.detokenizer(half[:2])
    assert stream.push([*half, *other_kind.encode("a")]) + stream.flush() == "😀 a"


def test_half_a_character_of_byte_tokens_waits(other_kind: Tokenizer) -> None:
    stream = other_kind.detokenizer()
    pieces = [stream.push([token_id]) for token_id in (3 + byte for byte in "\U00050000".encode())]
    assert pieces == ["", "", "", "\U00050000"]
    assert stream.push([3 + 0xE4]) == ""
    assert stream.flush() != ""


def test_endless_bytes_that_are_no_character_go_out(other_kind: Tokenizer) -> None:
    stream = other_kind.detokenizer()
    pieces = [stream.push([3 + 0x80]) for _ in range(2_000)]
    assert sum(map(len, pieces)) > 1_900


def test_facts_that_contradict_themselves(trained: Path) -> None:
    facts = read_tokenizer(trained)
    assert facts.byte_level_bpe is not None
    bpe = facts.byte_level_bpe
    for broken, says in (
        (replace(facts, byte_level_bpe=replace(bpe, merges=("q qqq",))), "merge 0 .* makes no token"),
        (replace(facts, byte_level_bpe=replace(bpe, tokens=("中", *bpe.tokens[1:]))), "not written in the byte alphabet"),
        (replace(facts, prompt_bos="<absent>"), "BOS token '<absent>' is not one of"),
    ):
        with pytest.raises(ConfigError, match=says):
            Tokenizer.build(broken)


def test_a_tokenizer_json_that_cant_be_read(sentencepiece_like: TokenizerFacts, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="the tokenizers package can't read it"):
        Tokenizer.build(replace(sentencepiece_like, tokenizer_json=tmp_path / "tokenizer.json"))
