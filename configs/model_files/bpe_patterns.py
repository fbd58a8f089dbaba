"""The regular expressions by which byte-level BPE models split text before merging, in tiktoken's dialect.

Each is the original with one exception: SmolLM2 isolates digits first and applies GPT-2's pattern to what lies between.
As one pattern this means that a digit stands alone, takes no space before it, and that a run of spaces ends at a digit as
it does at the end of the text: it keeps its last space there.
"""

from __future__ import annotations

from dataclasses import dataclass

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_SINGLE_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPLIT_PATTERNS = frozenset({GPT2, LLAMA3, QWEN2})
"""The patterns that a tokenizer.json may hand to its `Split` step."""


@dataclass(frozen=True)
class PreTokenizer:
    """How a model splits text before merging, and what it does to the text besides."""

    pattern: str
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False
    """Whether a prompt begins with BOS, for a GGUF file that doesn't say."""


_GPT2 = PreTokenizer(GPT2)
_GPT2_SINGLE_DIGITS = PreTokenizer(GPT2_SINGLE_DIGITS)
_LLAMA3 = PreTokenizer(LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(QWEN2, nfc=True)

BY_GGUF_NAME = {
    "gpt-2": _GPT2,
    "smollm": _GPT2_SINGLE_DIGITS,
    "starcoder": _GPT2_SINGLE_DIGITS,
    "refact": _GPT2_SINGLE_DIGITS,
    "command-r": _GPT2_SINGLE_DIGITS,
    "codeshell": _GPT2_SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""The pre-tokenizers by the value of `tokenizer.ggml.pre`.

What is equal and what is not is taken from llama.cpp's `src/llama-vocab.cpp`.
"""
