"""A vocabulary for small random models: token 0 ends an answer, 1 to 95 are ASCII's printable characters, 96 is a new line."""

from __future__ import annotations

from configs.facts import ByteLevelBpe, Model, ModelFacts, TokenizerFacts
from configs.model_files.vocabulary import byte_alphabet

NUM_LETTERS = 97


def with_letters(facts: ModelFacts) -> Model:
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    tokens = ["<end>", *(spelling[byte] for byte in (*range(0x20, 0x7F), 0x0A))]
    bpe = ByteLevelBpe(tokens=tuple(tokens), merges=(), pattern=r".|\n", ignore_merges=False, nfc=False)
    tokenizer = TokenizerFacts(
        byte_level_bpe=bpe,
        tokenizer_json=None,
        chat_template=None,
        special_tokens={"<end>": 0},
        user_tokens={},
        bos_token=None,
        eos_token="<end>",
        unk_token=None,
        prompt_bos=None,
    )
    return Model(facts, tokenizer)


def spoken(token_ids: list[int]) -> str:
    """What an answer says, without its end."""
    return "".join("\n" if each == NUM_LETTERS - 1 else chr(0x1F + each) for each in token_ids if each)
