"""What the dialogs of the operators' page order, with a document of stand-ins."""

from __future__ import annotations

import pytest

from tests.unit.router.page.javascript import NODE, run_script

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
