# ruff: noqa: RUF001 - characters that look like others are what these strings are for
"""The default model's tokenizer, and the same vocabulary in `transformers` as the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as ReferenceTokenizer
from transformers import PreTrainedTokenizerFast

from configs.facts import Model
from configs.models import resolve
from router.text.tokenizer import Tokenizer

VariedStrings = Callable[[int], list[str]]

_SCRIPTS = [
    "The quick brown fox doesn't jump; it's lazy, they've said. We'll see, I'm sure, you'd agree.",
    "THEY'LL SAY IT'S DON'T 'S 't 'Re x'sy 'l 'll''ll",
    "Füße, naïve café, Ångström, Dvořák, İstanbul, ﬁn, ſ",
    "Привет, как дела? Ёлка. Γειά σου Κόσμε, ὀξεῖα",
    "你好，世界！今天天气怎么样？ 日本語のテキスト、カタカナ。한국어 문장입니다.",
    "مرحبا بالعالم، كيف الحال؟ שלום עולם हिन्दी में पाठ தமிழ் ไทยภาษาไทย ქართული አማርኛ",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # comment\n\n\nclass A:\n    pass\n",
    '{"key": [1, 2.5e-10, null], \'x\': 0xFF}\r\n<div class="a">&amp;</div>',
    "$ ls -la | grep '^d' && echo \"done\" >> /dev/null; x=${y:-z}",
    "∑∫√≈≠ ← → ⇒ ☃ ★ © ™ € £ ¥ ₿ ½ ¼ ² ³ ₁ Ⅷ ⅷ ① ٣ ४ ௫ 五 〇 𝟘𝟙 ౸ ৴",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️ 😀😀😀 é ñ ạ̈ ऀ ⃝",
]
_PIECES = [
    *(" ", "  ", "   ", "        ", "\t", "\n", "\n\n", "\r\n", "\r", "\v", "\f", " \n ", "\u00a0", "\u2003", "\u3000"),
    *("\u2028", "\u0085", "\u200b", "\ufeff", "\x1c", "\x1d", "\x1f", "\0", "\x01", "\x04", "\x06", "\x13", "\x14", "\x16"),
    *("0", "1", "12", "345", "6789", "2024-01-31", "3.14159", "1,000,000", "½", "Ⅷ", "٣", "²", "१२३", "𝟙", "①"),
    *("'s", "'S", "'ll", "''", '"', "...", "!!!", "?!", "--", "___", "@#$%", "::", "</", "/>", "{{", "}}", "\\n", "```"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<reponame>", "<|im_start", "|>", "<", "<jupyter_code>"),
    *("a", "ab", "Hello", " world", "the", " The", "ING", "antidisestablishmentarianism", "naïve", "e\u0301", "\u0301"),
    *(
        "中",
        "文",
        "日本",
        "Привет",
        "مر",
        "हि",
        "😀",
        "👩‍🚀",
        "\u200d",
        "\ufe0f",
        "\U00050000",
        "\U0010ffff",
        "\ue000",
        "\ufffd",
    ),
]


@pytest.fixture(scope="session")
def smollm2() -> Model:
    return resolve("smollm2")


@pytest.fixture(scope="session")
def tokenizer(smollm2: Model) -> Tokenizer:
    return Tokenizer.build(smollm2.tokenizer)


@pytest.fixture(scope="session")
def reference(smollm2: Model) -> PreTrainedTokenizerFast:
    """SmolLM2 as its tokenizer.json has it: digits one by one, then GPT-2's byte level.

    When transformers 5 makes a tokenizer out of the GGUF file by itself, it leaves the step for digits out.
    """
    facts = smollm2.tokenizer
    bpe = facts.byte_level_bpe
    assert bpe is not None
    vocabulary = {token: token_id for token_id, token in enumerate(bpe.tokens)}
    merges: Any = [tuple(merge.split(" ")) for merge in bpe.merges]
    built = ReferenceTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, normalized=False) for token in facts.special_tokens])
    return PreTrainedTokenizerFast(tokenizer_object=built, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def varied_strings() -> VariedStrings:
    """So many strings of all kinds, the same ones every time."""
    return _varied_strings


def _varied_strings(count: int) -> list[str]:
    rng = random.Random(20)
    strings = ["", *_SCRIPTS, *_PIECES]
    makers = (_sentence, _mixture, _pieces, _any_characters, _long_run)
    while len(strings) < count:
        strings.append(rng.choice(makers)(rng))
    return strings[:count]


def _sentence(rng: random.Random) -> str:
    words = " ".join(rng.sample(_SCRIPTS, 2)).split(" ")
    return " ".join(rng.choices(words, k=rng.randint(1, 40)))


def _mixture(rng: random.Random) -> str:
    script = rng.choice(_SCRIPTS)
    start = rng.randrange(len(script))
    return script[start : start + rng.randint(1, 60)] + "".join(rng.choices(_PIECES, k=rng.randint(0, 5)))


def _pieces(rng: random.Random) -> str:
    return "".join(rng.choices(_PIECES, k=rng.randint(1, 30)))


def _any_characters(rng: random.Random) -> str:
    ranges = ((0, 0x7F), (0, 0xFF), (0x100, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF))
    low, high = rng.choice(ranges)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 40)))


def _long_run(rng: random.Random) -> str:
    return rng.choice(_PIECES) + rng.choice(_PIECES)[:1] * rng.randint(50, 500) + rng.choice(_PIECES)
