"""The chat page, with a document of stand-ins and a server that answers when a test lets it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.router.page.javascript import FOLDER, NODE, run_script

pytestmark = pytest.mark.skipif(NODE is None, reason="no node in PATH")

_LOST = "The connection was lost before the answer was complete."

PAGE = """async (_, given) => {
    const made = (id) => ({
        on: {}, value: "", hidden: true, children: [],
        addEventListener(name, act) { this.on[name] = act; },
        append(...added) {
            this.children.push(...added);
            for (const each of added) each.remove = () => this.children.splice(this.children.indexOf(each), 1);
        },
        requestSubmit() { this.on.submit({ preventDefault() {} }); },
        focus() { document.activeElement = this; },
        checkValidity: () => true, matches: () => false, contains: () => false,
        cloneNode() {}, replaceWith() {},
    });
    const elements = new Map();
    const element = (id) => elements.get(id) ?? elements.set(id, made()).get(id);
    globalThis.document = {
        on: {}, activeElement: null, documentElement: {}, getElementById: element, createElement: made, createTextNode: made,
        addEventListener(name, act) { this.on[name] = act; },
    };
    Object.assign(globalThis, { scrollTo() {}, scrollY: 0, requestAnimationFrame() {}, cancelAnimationFrame() {} });
    globalThis.getSelection = () => ({ isCollapsed: true });

    const kept = new Map();
    globalThis.sessionStorage = {
        getItem: (name) => kept.get(name) ?? null,
        setItem: (name, value) => kept.set(name, value),
        removeItem: (name) => kept.delete(name),
    };
    if (given.storage === "forbidden") Object.defineProperty(globalThis, "sessionStorage", {
        get() { throw new DOMException("", "SecurityError"); },
    });
    const asked = []; // each request, with what it is answered by
    globalThis.fetch = (path, { headers, body, signal }) => new Promise((answer, fail) => {
        asked.push({ path, key: headers.authorization ?? null, body: body && JSON.parse(body), answer, fail });
        signal.addEventListener("abort", () => fail(signal.reason));
    });
    const settled = () => new Promise((resolve) => setTimeout(resolve)); // all that needs no further answer has happened
    const answer = async (request, status, value) => {
        request.answer({ ok: status === 200, status, headers: new Headers(), json: async () => value });
        await settled();
    };
    const stream = async (request, events, whole) => {
        const texts = events.map((event) => `data: ${JSON.stringify(event)}\\n\\n`);
        if (whole) texts.push("data: [DONE]\\n\\n");
        const read = async () => ({ value: texts.join(""), done: texts.splice(0).length === 0 });
        const body = { pipeThrough: () => ({ getReader: () => ({ read, cancel: async () => {} }) }) };
        request.answer({ ok: true, body });
        await settled();
    };
    const model = { data: [{ id: "smollm2" }] };
    const unknown = { error: { message: "this API key is not known here" } };
    const submitKey = (key) => {
        element("key").value = key;
        element("key-form").requestSubmit();
    };
    const send = (text) => {
        element("message").value = text;
        element("composer").requestSubmit();
    };
    element("key-form").hidden = true;
    await import(given.page);
    SCENARIO
}"""


def play(scenario: str, storage: str = "allowed") -> Any:
    """What a scenario on the opened page returns. The page has asked for the model, and nobody has answered."""
    return run_script(PAGE.replace("SCENARIO", scenario), {"page": (FOLDER / "page.js").as_uri(), "storage": storage})


def test_a_late_answer_to_another_key_changes_nothing() -> None:
    scenario = """
    await answer(asked[0], 401, unknown);
    submitKey("wrong");
    submitKey("good");
    await answer(asked[2], 200, model);
    await answer(asked[1], 401, unknown);
    return {
        keys: asked.map((each) => each.key), asks: !element("key-form").hidden, problem: element("problem").textContent,
        kept: [...kept.values()], model: element("model").textContent, focus: document.activeElement === element("message"),
    };
    """
    assert play(scenario) == {
        "keys": [None, "Bearer wrong", "Bearer good"],
        "asks": False,
        "problem": "",
        "kept": ["good"],
        "model": "smollm2",
        "focus": True,
    }


def test_a_late_failure_to_find_the_model_is_not_told_once_it_is_found() -> None:
    scenario = """
    send("hello");
    await answer(asked[1], 200, model);
    asked[0].fail(new DOMException("", "TimeoutError"));
    await settled();
    return { paths: asked.map((each) => each.path), problem: element("problem").textContent };
    """
    assert play(scenario) == {"paths": ["v1/models", "v1/models", "v1/chat/completions"], "problem": ""}


def test_a_question_goes_on_with_the_key_that_was_given_meanwhile() -> None:
    scenario = """
    await answer(asked[0], 401, unknown);
    send("hello");
    submitKey("good");
    await answer(asked[1], 401, unknown);
    await answer(asked[2], 200, model);
    return { keys: asked.map((each) => each.key), problem: element("problem").textContent };
    """
    assert play(scenario) == {"keys": [None, None, "Bearer good", "Bearer good"], "problem": ""}


def test_it_works_where_the_browser_forbids_storage() -> None:
    scenario = """
    await answer(asked[0], 401, unknown);
    submitKey("wrong");
    await answer(asked[1], 401, unknown);
    const problems = [element("problem").textContent];
    submitKey("good");
    await answer(asked[2], 200, model);
    send("hello");
    problems.push(element("problem").textContent);
    return { keys: asked.map((each) => each.key), problems };
    """
    assert play(scenario, storage="forbidden") == {
        "keys": [None, "Bearer wrong", "Bearer good", "Bearer good"],
        "problems": ["This API key is not known here.", ""],
    }


@pytest.mark.parametrize(
    ("reason", "whole", "turns"),
    [
        ("stop", True, {"messages": ["hello", ""], "figures": "2 tokens", "back": "", "problem": ""}),
        ("length", True, {"messages": ["hello", ""], "figures": "2 tokens · token limit reached", "back": "", "problem": ""}),
        (None, False, {"messages": [], "figures": None, "back": "hello", "problem": _LOST}),
    ],
)
def test_a_question_without_a_text_comes_back_only_if_its_answer_is_incomplete(
    reason: str | None, whole: bool, turns: dict[str, object]
) -> None:
    scenario = f"""
    await answer(asked[0], 200, model);
    send("hello");
    await settled();
    const choices = [{{ delta: {{ content: "" }}, token_ids: [7, 8], finish_reason: {json.dumps(reason)} }}];
    await stream(asked[1], [{{ choices }}], {json.dumps(whole)});
    const figures = element("log").children[1]?.children[1].textContent.replaceAll("\u00a0", " ");
    const [back, problem] = [element("message").value, element("problem").textContent];
    send("again");
    await settled();
    const messages = asked[2].body.messages.slice(0, -1).map((each) => each.content);
    return {{ messages, figures: figures?.replace(/^First token after [0-9.]+ s · /, "") ?? null, back, problem }};
    """
    assert play(scenario) == turns


@pytest.mark.parametrize(
    ("key", "sends"),
    [
        ({"keyCode": 13, "isComposing": False}, True),
        ({"keyCode": 229, "isComposing": True}, False),
        ({"keyCode": 229, "isComposing": False}, False),
    ],
    ids=["no input method", "input method", "input method in Safari"],
)
def test_enter_sends_unless_it_ends_a_composition(key: dict[str, object], sends: bool) -> None:
    scenario = f"""
    element("message").value = "hello";
    element("message").on.keydown({{ key: "Enter", preventDefault() {{}}, ...{json.dumps(key)} }});
    return element("message").value === "";
    """
    assert play(scenario) is sends
