"""The chat page asks for another key where the one that it has is of no use, with a document of stand-ins."""

from __future__ import annotations

import pytest

from tests.unit.router.page.javascript import FOLDER, NODE, run_script

pytestmark = pytest.mark.skipif(NODE is None, reason="no node in PATH")

OPENED = """async (_, given) => {
    const elements = new Map();
    const made = () => ({ hidden: true, addEventListener() {}, focus() {} });
    const element = (id) => elements.get(id) ?? elements.set(id, made()).get(id);
    globalThis.document = { getElementById: element, addEventListener() {} };
    const kept = new Map(given.key === null ? [] : [["tandem-api-key", given.key]]);
    globalThis.sessionStorage = { getItem: (name) => kept.get(name) ?? null, removeItem: (name) => kept.delete(name) };
    globalThis.fetch = async () => new Response(JSON.stringify(given.answer), { status: given.status });
    await import(given.page);
    await new Promise((resolve) => setTimeout(resolve, 100));
    return { asks: !element("key-form").hidden, kept: kept.size, problem: element("problem").textContent };
}"""


@pytest.mark.parametrize(
    ("status", "answer", "problem"),
    [
        (200, {"data": []}, "This key is not for the model that is served here."),
        (401, {"error": {"message": "wrong key"}}, "Wrong key."),
        (403, {"error": {"message": "not with this key"}}, "Not with this key."),
    ],
)
def test_a_key_that_is_of_no_use_is_forgotten_and_another_asked_for(status: int, answer: object, problem: str) -> None:
    assert opened(status, answer, "old") == {"asks": True, "kept": 0, "problem": problem}


@pytest.mark.parametrize(
    ("status", "problem"), [(401, ""), (403, "Only this machine may use the cluster.")], ids=["asked for", "would not help"]
)
def test_without_a_key_it_says_what_a_key_would_not_change(status: int, problem: str) -> None:
    said = {"error": {"message": "only this machine may use the cluster"}}
    assert opened(status, said, None) == {"asks": True, "kept": 0, "problem": problem}


@pytest.mark.parametrize("param", ["host", "origin"])
def test_a_key_is_kept_where_the_address_is_what_is_wrong(param: str) -> None:
    said = {"error": {"message": "no page of this origin may ask", "param": param}}
    assert opened(403, said, "good") == {"asks": False, "kept": 1, "problem": "No page of this origin may ask."}


def opened(status: int, answer: object, key: str | None) -> object:
    return run_script(OPENED, {"page": (FOLDER / "page.js").as_uri(), "status": status, "answer": answer, "key": key})
