"""The chat page in a real browser, against a real cluster: what it shows, what it says to screen readers, what it asks for.

Nothing that it does may leave the origin, and nothing may go wrong unseen: a visit's end (`page_visit.py`) fails on either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.cases import slow
from tests.integration.page_visit import CHAT, CHROMIUM, Visit

FIGURES = re.compile(r"^First token after \d+\.\d\d s(\s· \d+\.\d tokens/s)?\s· \d+ tokens$")
STORY = "Write a very long story about a cat and a dog."

CONTRASTS = """() => {
    const channels = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = (color) => {
        const [r, g, b] = channels(color).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const color = getComputedStyle(each).backgroundColor;
            if (channels(color)[3] !== 0) return color;
        }
    };
    const ratio = (element, pseudo) => {
        const pair = [getComputedStyle(element, pseudo).color, ground(element)].map(luminance).sort((a, b) => b - a);
        return (pair[0] + 0.05) / (pair[1] + 0.05);
    };
    const seen = [...document.querySelectorAll("body *")].filter((each) => each.checkVisibility());
    const texts = seen.filter((each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
    const fields = seen.filter((each) => each.placeholder);
    return [
        ...texts.map((each) => [`${each.tagName}: ${each.textContent}`, ratio(each)]),
        ...fields.map((each) => [`placeholder: ${each.placeholder}`, ratio(each, "::placeholder")]),
    ];
}"""
"""For each text that is seen, and each placeholder: what it is, and its contrast to what is behind it."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH (Debian: apt-get install chromium)")


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Opens the page of a cluster: `visit(cluster, color_scheme="dark")`."""
    visits: list[Visit] = []

    def start(cluster: Any, **options: Any) -> Visit:
        visits.append(Visit(browser, cluster.url, **options))
        return visits[-1]

    yield start
    for each in visits:
        each.close()


@pytest.mark.slow
def test_a_conversation_by_keyboard(cluster: Any, visit: Callable[..., Visit]) -> None:
    chat = visit(cluster)
    page = chat.page
    expect(page.get_by_text("smollm2", exact=True)).to_be_visible()
    chat.set(System_prompt="You are a helpful assistant.", Temperature="0", Max_tokens="24")
    chat.message.focus()
    page.evaluate(
        """() => {
            window.steps = new Set();
            const look = () => steps.add(document.querySelector(".text.open")?.textContent.length ?? 0);
            const all = {subtree: true, childList: true, characterData: true};
            new MutationObserver(look).observe(document.querySelector("main"), all);
        }"""
    )
    page.keyboard.type("Name three colours,")
    page.keyboard.press("Shift+Enter")
    first = chat.send("<b>not bold</b>.")
    expect(chat.figures(0)).to_have_text(re.compile(r"^First token after \d+\.\d\d s\s· \d+\.\d tokens/s\s· \d+ tokens"))
    assert len(page.evaluate("[...steps]")) >= 4, "the answer came piece by piece"
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0, 24, "smollm2")
    question = "Name three colours,\n<b>not bold</b>."
    system = {"role": "system", "content": "You are a helpful assistant."}
    assert first["messages"] == [system, {"role": "user", "content": question}]
    assert chat.questions.text_content() == question

    second = chat.send("Name the capital of France.")
    expect(chat.figures(1)).to_have_text(FIGURES)
    expect(chat.answers.nth(1)).to_contain_text("Paris")
    roles = [message["role"] for message in second["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    said = chat.answers.nth(0).locator(".text").text_content()
    assert said
    assert "".join(second["messages"][2]["content"].split()) == "".join(said.split())
    expect(chat.message).to_be_focused()

    page.get_by_role("button", name="New chat").press("Enter")
    expect(chat.log).to_be_empty()
    assert len(chat.send("Hi.")["messages"]) == 2, "the system prompt stays"
    expect(chat.figures(0)).not_to_be_empty()


@pytest.mark.parametrize("how", ["Escape", *slow(["Stop", "New chat"])])
def test_stopping_frees_the_stream(cluster: Any, visit: Callable[..., Visit], how: str) -> None:
    chat = visit(cluster)
    chat.set(Temperature="0")
    chat.message.focus()
    chat.send(STORY)
    chat.until_text(0)
    assert not cluster.clean()
    if how == "Escape":
        chat.page.keyboard.press("Escape")
    else:
        chat.page.get_by_role("button", name=how).click()
    cluster.until(cluster.clean, 10)
    assert cluster.leaks() == []
    expect(chat.page.get_by_role("button", name="Send")).to_be_visible()
    expect(chat.message).to_be_focused()
    if how == "New chat":
        expect(chat.log).to_be_empty()
    else:
        expect(chat.figures(0)).to_have_text(re.compile(r"tokens\s· stopped$"))
    chat.set(Max_tokens="8")
    chat.message.focus()
    assert len(chat.send("Go on.")["messages"]) == (1 if how == "New chat" else 3)
    expect(chat.page.get_by_text("token limit reached")).to_be_visible()


def test_what_goes_wrong_is_said_in_words_and_loses_nothing(cluster: Any, visit: Callable[..., Visit]) -> None:
    chat = visit(cluster)
    expect(chat.page.get_by_text("smollm2", exact=True)).to_be_visible()
    chat.set(Temperature="9", Max_tokens="8")
    chat.message.focus()
    chat.send("Hello there.")
    expect(chat.problem).to_have_text("`temperature` must be a number from 0 to 2; got 9.")
    expect(chat.message).to_have_value("Hello there.")
    expect(chat.log).to_be_empty()
    chat.foresee("status of 400")

    chat.set(Temperature="0")
    chat.message.focus()
    chat.context.set_offline(True)
    chat.send("")
    expect(chat.problem).to_contain_text("The server can't be reached.")
    chat.foresee("ERR_INTERNET_DISCONNECTED")
    chat.context.set_offline(False)
    chat.send("")
    expect(chat.figures(0)).not_to_be_empty()
    expect(chat.problem).to_be_empty()
    expect(chat.message).to_have_value("")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ('data: {"error": {"message": "no worker could go on"}}\n\n', "The answer broke off. No worker could go on."),
        ("", "The connection was lost before the answer was complete."),
        ('data: {"choi', "The connection was lost before the answer was complete."),
    ],
)
def test_an_answer_that_breaks_off(cluster: Any, visit: Callable[..., Visit], end: str, said: str) -> None:
    """A cluster goes on when a worker dies, so the end of this answer is made up here."""
    chat = visit(cluster)
    piece = (
        'data: {"choices": [{"index": 0, "delta": {"content": "One, two"}, "token_ids": [7, 8], "finish_reason": null}]}\n\n'
    )
    chat.page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=piece + end))
    expect(chat.page.get_by_text("smollm2", exact=True)).to_be_visible()
    chat.send("Count.")
    expect(chat.problem).to_have_text(said)
    expect(chat.answers.locator(".text")).to_have_text("One, two")
    expect(chat.figures(0)).to_contain_text("incomplete")
    assert [message["content"] for message in chat.send("Go on.")["messages"]] == ["Count.", "One, two", "Go on."]


@pytest.mark.slow
def test_text_stays_text_and_grows_as_it_would_be_whole(cluster: Any, visit: Callable[..., Visit]) -> None:
    chat = visit(cluster)
    text = (
        "Say:\r\n\n<img src=x onerror=alert(1)>\nand\n\n\n```html\n<b>\n\n``\n````\n~~~ x\n```\n~~~~\nend ``` here\n```\nopen"
    )
    whole, differences = chat.page.evaluate(
        """async (text) => {
            const { show } = await import("./page/text.js");
            const [growing, differences] = [document.createElement("div"), []];
            for (let length = 0; length <= text.length; length++) {
                const fresh = document.createElement("div");
                show(growing, text.slice(0, length));
                show(fresh, text.slice(0, length));
                if (!growing.isEqualNode(fresh)) differences.push(length);
            }
            return [[...growing.children].map((each) => [each.tagName, each.childElementCount, each.textContent]), differences];
        }""",
        text,
    )
    assert differences == []
    assert whole == [
        ["P", 0, "Say:\r"],
        ["P", 0, "<img src=x onerror=alert(1)>\nand"],
        ["PRE", 0, "<b>\n\n``"],
        ["PRE", 0, "```"],
        ["P", 0, "end ``` here"],
        ["PRE", 0, "open"],
    ]
    selected = chat.page.evaluate(
        """async () => {
            const { show } = await import("./page/text.js");
            const growing = document.body.appendChild(document.createElement("div"));
            show(growing, "```\\none\\ntwo");
            const code = growing.firstChild.firstChild;
            getSelection().setBaseAndExtent(code, 0, code, 3);
            show(growing, "```\\none\\ntwo\\nthree");
            return getSelection().toString();
        }"""
    )
    assert selected == "one", "what a reader has selected stays so while the code grows"


@pytest.fixture(scope="module")
def guarded(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A cluster with keys, and a key for one request a minute."""
    keys_file = tmp_path_factory.mktemp("keys") / "keys.json"
    keys_file.write_text('{"keys": {}}')
    served = serve("--keys-file", str(keys_file), environment={"TANDEM_ADMIN_KEY": "sesame"})
    served.wait_ready()
    added = served.command("keys", "add", "--tenant", "a", "--requests-per-minute", "1", "--keys-file", str(keys_file))
    return served, added.stdout.strip()


@pytest.mark.slow
def test_a_key_is_asked_for_where_one_is_needed(guarded: tuple[Any, str], visit: Callable[..., Visit]) -> None:
    cluster, key = guarded
    chat = visit(cluster)
    page = chat.page
    field = page.get_by_label("API key").get_by_role("textbox")
    expect(field).to_be_focused()
    expect(chat.problem).to_be_empty()
    chat.foresee("status of 401")
    page.keyboard.type("tk-wrong")
    page.keyboard.press("Enter")
    expect(chat.problem).not_to_be_empty()
    expect(field).to_be_focused()
    chat.foresee("status of 401")
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    expect(field).to_be_hidden()
    chat.set(Max_tokens="8")
    chat.message.focus()
    chat.send("Hello.")
    expect(chat.figures(0)).not_to_be_empty()
    chat.send("And again.")
    expect(chat.problem).to_have_text(re.compile(r"Try again in \d+ seconds\.$"))
    expect(chat.message).to_have_value("And again.")
    chat.foresee("status of 429")
    assert not any("tk-" in url for url in [*chat.requests, page.url])
    assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]") == [[key], [], ""]


@pytest.mark.slow
def test_it_can_be_used_without_seeing_it(cluster: Any, visit: Callable[..., Visit]) -> None:
    """Landmarks, names and states; where the focus goes; what is read aloud, and when."""
    chat = visit(cluster)
    page = chat.page
    landmarks: list[tuple[Any, str | None]] = [("banner", None), ("main", None), ("heading", "Tandem"), ("form", "New message")]
    for role, name in landmarks:
        expect(page.get_by_role(role, name=name)).to_be_visible()
    expect(page.locator("#key-form")).to_be_hidden()
    expect(chat.log).to_be_attached()
    expect(chat.problem).to_be_attached()
    expect(chat.message).to_be_focused()
    settings = page.get_by_role("button", name="Settings")
    settings.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("form", name="Settings")).to_be_visible()
    expect(page.get_by_role("textbox", name="System prompt")).to_be_focused()
    for name in ("Temperature", "Max tokens"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("spinbutton", name=name)).to_be_focused()
    page.keyboard.type("1000")
    page.keyboard.press("Escape")
    expect(page.get_by_role("form", name="Settings")).to_be_hidden()
    expect(settings).to_be_focused()

    assert chat.log.get_attribute("aria-live") == "polite"
    chat.message.focus()
    chat.send(STORY)
    chat.until_text(0)
    growing = chat.answers.locator(".text")
    assert growing.get_attribute("aria-live") == "off", "a log that read every token could not be listened to"
    page.evaluate("window.growing = document.querySelector('.text')")
    page.keyboard.press("Escape")
    expect(chat.figures(0)).to_contain_text("stopped")
    assert growing.get_attribute("aria-live") is None
    assert page.evaluate("!growing.isConnected"), "it is read because it comes into the log as a whole"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390, 320])
def test_every_text_can_be_read(cluster: Any, visit: Callable[..., Visit], scheme: str, width: int) -> None:
    """Contrast of WCAG AA, nothing wider than the window, nothing that moves for those who asked for that."""
    size = {"width": width, "height": 700}
    chat = visit(cluster, color_scheme=scheme, viewport=size, reduced_motion="reduce")
    expect(chat.page.get_by_text("smollm2", exact=True)).to_be_visible()
    chat.set(Temperature="9")
    chat.message.focus()
    chat.send("Hello.")
    expect(chat.problem).not_to_be_empty()
    chat.foresee("status of 400")
    found = dict(chat.page.evaluate(CONTRASTS))
    chat.set(Temperature="0")
    chat.message.focus()
    chat.send(STORY)
    chat.until_text(0)
    moving = "document.getAnimations().length"
    assert chat.page.evaluate(moving) == 0
    chat.page.keyboard.press("Escape")
    expect(chat.figures(0)).to_contain_text("stopped")
    chat.page.get_by_role("button", name="Settings").press("Enter")
    found |= dict(chat.page.evaluate(CONTRASTS))
    assert len(found) > 8
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= width
