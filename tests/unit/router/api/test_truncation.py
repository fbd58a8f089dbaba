"""Which messages of a chat that is too long are dropped."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.api.truncation import truncated, turns

SHORT = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def roles_of(letters: str) -> list[str]:
    return [SHORT[letter] for letter in letters]


def test_turns() -> None:
    assert turns(roles_of("suauatu")) == [[1, 2], [3, 4, 5]]
    assert turns(roles_of("uauasu")) == [[0, 1], [2, 3]]
    assert turns(roles_of("u")) == turns(roles_of("su")) == turns(roles_of("s")) == turns(roles_of("sa")) == []
    assert turns(roles_of("auu")) == [[0], [1]], "a greeting comes before any turn"
    assert turns(roles_of("uauattatat")) == [[0, 1], [3, 4, 5], [6, 7]], "rounds of calls after the last user's message"
    assert turns(roles_of("aaa")) == [[0], [1]]


class Renderer:
    """Every message has a number of tokens, the chat one more; counts its calls."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.rendered: list[int] = []

    def __call__(self, indices: Sequence[int]) -> list[int]:
        self.rendered.append(len(indices))
        return [-1, *(index for index in indices for _ in range(self.lengths[index]))]


chats = st.lists(st.tuples(st.sampled_from(sorted(SHORT.values())), st.integers(1, 20)), min_size=1, max_size=40)


@given(chats, st.integers(0, 200))
def test_as_few_turns_as_it_takes_and_only_what_may_go(chat: list[tuple[str, int]], max_tokens: int) -> None:
    roles, lengths = [role for role, _ in chat], [length for _, length in chat]
    units = turns(roles)
    gone = [index for unit in units for index in unit]
    assert sorted(gone) == gone, "oldest first"
    assert len(set(gone)) == len(gone)
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=None)
    assert last_user not in gone
    assert not any(roles[index] in ("system", "developer") for index in gone)

    answer = truncated(roles, Renderer(lengths), max_tokens)

    def tokens_without(num_units: int) -> list[int]:
        dropped = {index for unit in units[:num_units] for index in unit}
        return Renderer(lengths)([index for index in range(len(roles)) if index not in dropped])

    fitting = [num for num in range(1, len(units) + 1) if len(tokens_without(num)) <= max_tokens]
    if not fitting:
        assert answer is None
    else:
        assert answer is not None
        assert answer.token_ids == tokens_without(fitting[0])
        assert answer.num_dropped == sum(map(len, units[: fitting[0]]))


@given(chats)
def test_a_call_and_its_results_go_together(chat: list[tuple[str, int]]) -> None:
    roles = [role for role, _ in chat]
    unit_of = {index: number for number, unit in enumerate(turns(roles)) for index in unit}
    caller = None
    for index, role in enumerate(roles):
        if role == "tool" and caller is not None:
            assert unit_of.get(index) == unit_of.get(caller)
        elif role in ("user", "assistant"):
            caller = index if role == "assistant" else None


def test_a_long_chat_is_rendered_a_few_times_and_ever_shorter() -> None:
    roles = roles_of("s" + "ua" * 4096 + "u")
    renderer = Renderer([1] * len(roles))
    answer = truncated(roles, renderer, 100)
    assert answer is not None
    assert len(answer.token_ids) in (99, 100)
    assert len(renderer.rendered) <= 13
    assert sum(renderer.rendered) < 1.2 * len(roles)
