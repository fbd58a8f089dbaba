"""What the dialogs of the operators' page order, with a document of stand-ins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.router.page.javascript import FOLDER, NODE, run_script

pytestmark = pytest.mark.skipif(NODE is None, reason="no node in PATH")

ORDERED = """(actions, given) => {
    const elements = new Map();
    const made = (id) => ({
        on: {}, value: "", dataset: {},
        get valueAsNumber() { return Number(this.value); },
        addEventListener(name, act) { this.on[name] = act; },
        querySelector: (selector) => element(`${id} ${selector}`),
        querySelectorAll: () => [],
        closest: () => element(`around ${id}`),
        showModal() {}, focus() {},
    });
    const element = (id) => elements.get(id) ?? elements.set(id, made(id)).get(id);
    globalThis.document = { getElementById: element };
    let wanted = given.opened;
    const ordered = [];
    const cluster = { poll: () => ({ wanted, routers: null }), post: async (path, sizes) => ordered.push(sizes) };
    actions.connectActions(cluster, () => {});
    element("scale-button").on.click();
    wanted = given.now;
    for (const [name, number] of Object.entries(given.edits)) element(`scale-${name}`).value = number;
    element("scale form").on.submit({ preventDefault() {} });
    return ordered;
}"""


@pytest.mark.parametrize(
    ("edits", "ordered"),
    [
        ({"decode": 4}, [{"decode": 4}]),
        ({"prefill": 3}, [{"prefill": 3}]),
        ({}, []),
    ],
)
def test_scale_orders_what_was_edited_whatever_else_has_changed(edits: dict[str, int], ordered: list[dict[str, int]]) -> None:
    given = {"opened": {"prefill": 2, "decode": 3}, "now": {"prefill": 3, "decode": 3}, "edits": edits}
    assert run_script(ORDERED, given, "ops/actions.js") == ordered


DRAINED = """async (actions, given) => {
    const elements = new Map();
    const made = (id) => ({
        on: {}, value: "", dataset: {}, elements: { then: { value: "restart" } },
        addEventListener(name, act) { this.on[name] = act; },
        querySelector: (selector) => element(`${id} ${selector}`),
        querySelectorAll: () => [],
        closest: () => element(`around ${id}`),
        showModal() {}, focus() {}, reset() {},
    });
    const element = (id) => elements.get(id) ?? elements.set(id, made(id)).get(id);
    globalThis.document = { getElementById: element, querySelector: element };
    let answer;
    const answered = new Promise((resolve, reject) => (answer = given.status ? reject : resolve));
    const told = [];
    const { drain } = actions.connectActions({ poll: () => ({}), post: () => answered }, (...event) => told.push(event));
    drain("prefill-0");
    element("drain form").on.submit({ preventDefault() {} });
    if (given.another) drain("prefill-1");
    const { Failure } = await import(given.api);
    answer(given.status ? new Failure("Late.", given.status === "lost" ? null : given.status) : {});
    await new Promise((resolve) => setTimeout(resolve, 50));
    const [outcome, submit] = [element("drain form .outcome"), element("drain form [type=submit]")];
    return { told, outcome: outcome.textContent ?? "", hidden: submit.hidden };
}"""


def drained(status: int | str | None, *, another: bool = False) -> Any:
    given = {"status": status, "another": another, "api": (FOLDER / "api.js").as_uri()}
    return run_script(DRAINED, given, "ops/actions.js")


def test_an_answer_is_told_where_it_was_asked_for() -> None:
    event = ["note", "asked here to drain prefill-0; then it starts anew"]
    assert drained(None) == {"told": [event], "outcome": "prefill-0 drains, then it starts anew.", "hidden": True}
    assert drained(None, another=True) == {"told": [event], "outcome": "", "hidden": False}, "the dialog is of another worker"
    assert drained(400, another=True) == {"told": [["bad", "refused: Late."]], "outcome": "", "hidden": False}


@pytest.mark.parametrize(("status", "known"), [(400, True), (404, True), (503, False), ("lost", False)])
def test_only_what_the_cluster_refuses_is_called_refused(status: int | str, known: bool) -> None:
    assert drained(status)["told"] == [["bad", f"{'refused' if known else 'not known whether it was done'}: Late."]]
