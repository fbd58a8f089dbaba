"""The operators' page in a real browser, against real clusters: what it shows, and what it does when told to.

Nothing that it does may leave the origin, and nothing may go wrong unseen: a visit's end (`page_visit.py`) fails on either.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.integration.ops_visit import OpsVisit, load
from tests.integration.page_visit import CHROMIUM, violations
from tests.unit.polled_clusters import status, unheard, worker

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH (Debian: apt-get install chromium)")

HIDE = """hidden => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
LOOKED_S = 2.5
"""The page would look twice in this time."""


@pytest.fixture(scope="module")
def paced(serve: Callable[..., Any]) -> Any:
    served = serve("--engine", "paced", "--prefill", "3", "--decode", "3", "--disaggregation", "always")
    served.wait_ready()
    return served


@pytest.fixture
def cluster(paced: Any) -> Any:
    """Three workers of each role, idle."""
    if not paced.settled(3, 3):
        paced.until(lambda: paced.scale(prefill=3, decode=3).status_code == 200, 60)
        paced.until(lambda: paced.settled(3, 3), 60)
    paced.until(paced.clean, 30)
    return paced


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., OpsVisit]]:
    """Opens the page of a cluster: `visit(cluster, color_scheme="dark")`."""
    visits: list[OpsVisit] = []

    def start(cluster: Any, **options: Any) -> OpsVisit:
        visits.append(OpsVisit(browser, cluster.url, **options))
        return visits[-1]

    yield start
    for each in visits:
        each.close()


def test_a_cluster_of_the_real_model_is_shown_and_audited(shared_cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(shared_cluster)
    ops.live()
    assert sorted(ops.workers()) == sorted(row["worker_id"] for row in shared_cluster.workers())
    with load(shared_cluster.url, 2, max_tokens=60):
        expect(ops.tile("requests running")).to_have_text(re.compile(r"[1-9]"))
        expect(ops.tile("tokens/s out")).to_have_text(re.compile(r"^[1-9]"))
    ops.page.get_by_role("button", name="Audit").click()
    ops.confirm("Audit")
    expect(ops.outcome).to_contain_text("No leak")
    ops.close_dialog()


@pytest.mark.slow
def test_it_shows_every_worker_and_their_load(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    assert sorted(ops.workers()) == sorted(row["worker_id"] for row in cluster.workers())
    expect(ops.page.get_by_text("smollm2", exact=True)).to_be_visible()
    for role in ("prefill", "decode"):
        expect(ops.tile(f"{role} ready")).to_have_text("3 / 3")
    with load(cluster.url, 12):
        expect(ops.tile("requests running")).to_have_text(re.compile(r"[1-9]"))
        for name in ("tokens/s in", "tokens/s out"):
            expect(ops.tile(name)).to_have_text(re.compile(r"^[1-9]"))
        for role in ("prefill", "decode"):
            of_role = ops.page.get_by_role("region", name=re.compile(f"^{role}", re.IGNORECASE))
            expect(of_role.locator(".share", has_text="busy").filter(has_text=re.compile(r"[1-9]\d*%")).first).to_be_visible()
        for stage in ("prefill", "decode"):
            expect(ops.page.locator(f"#stages dl .{stage}")).to_contain_text(re.compile(r"\d m?s, [1-9]\d*%"))
        first_token = ops.page.get_by_role("row", name=re.compile("First token"))
        expect(first_token.get_by_role("cell").first).to_have_text(re.compile(r"\d m?s$"))
        for title in ("Tokens in per second", "Tokens out per second", "Busy"):
            expect(
                ops.page.get_by_role("img", name=re.compile(f"^{title} in the last two minutes; now .*[1-9]"))
            ).to_be_visible()
    expect(ops.tile("requests running")).to_have_text("0")
    expect(ops.tile("tokens/s out")).to_have_text("0")


@pytest.mark.slow
def test_drain_and_scale_with_confirmation(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    last = [row["worker_id"] for row in cluster.workers() if row["role"] == "decode"][-1]
    with load(cluster.url, 6):
        button = ops.page.get_by_role("button", name=f"Drain {last}", exact=True)
        button.click()
        expect(ops.dialog).to_have_accessible_name(f"Drain {last}")
        ops.dialog.get_by_role("button", name="Cancel").click()
        expect(ops.dialog).to_be_hidden()
        expect(button).to_be_focused()
        assert cluster.settled(3, 3), "nothing was asked for yet"
        button.click()
        ops.dialog.get_by_label("it ends").check()
        ops.confirm("Drain")
        expect(ops.outcome).to_have_text(f"{last} drains, then it ends.")
        ops.close_dialog()
        expect(ops.event("decode: 2 workers wanted, before 3")).to_be_visible()
        expect(ops.event(f"{last} is gone")).to_be_visible(timeout=60_000)
        expect(ops.card(last)).to_have_count(0)
        expect(ops.tile("decode ready")).to_have_text("2 / 2")
    assert cluster.settled(3, 2)

    ops.page.get_by_role("button", name="Scale").press("Enter")
    expect(ops.dialog.get_by_label("Prefill workers")).to_have_value("3")
    ops.dialog.get_by_label("Decode workers").fill("3")
    ops.page.keyboard.press("Enter")
    expect(ops.outcome).to_have_text("The cluster is on its way to 3 decode workers.")
    ops.page.keyboard.press("Enter")
    expect(ops.dialog).to_be_hidden()
    expect(ops.tile("decode ready")).to_have_text("3 / 3", timeout=60_000)
    expect(ops.event("asked here for 3 decode workers")).to_be_visible()
    cluster.until(lambda: cluster.settled(3, 3), 30)


@pytest.mark.slow
def test_a_rollout_is_told_phase_by_phase(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    body = {"action": "start", "config": {"decode": {"max_batch_size": 128}}, "canary": 0.5, "watch_s": 300}
    revision = cluster.ask("POST", "/admin/rollout", json=body).json()["revision"]
    # A page that looks late sees the next phase first.
    begun = f"rollout of revision {revision} (decode.max_batch_size: 256 -> 128): "
    expect(ops.event(begun + "starting").or_(ops.event(begun + "canary")).first).to_be_visible()
    expect(ops.tile("rollout")).to_have_text("canary, 50%", timeout=60_000)
    assert cluster.ask("POST", "/admin/rollout", json={"action": "abort"}).status_code == 200
    expect(ops.event(f"rollout of revision {revision}: rolled back")).to_be_visible(timeout=60_000)
    expect(ops.tile("rollout")).to_have_text("rolled back")
    cluster.until(lambda: cluster.settled(3, 3), 60)


@pytest.mark.slow
def test_a_worker_flips_with_confirmation(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    name = next(row["worker_id"] for row in cluster.workers() if row["role"] == "prefill")
    with load(cluster.url, 4):
        ops.page.get_by_role("button", name=f"Flip {name}", exact=True).click()
        expect(ops.dialog).to_have_accessible_name(f"Flip {name}")
        ops.confirm("Flip")
        expect(ops.outcome).to_have_text(f"{name} is a decode worker now.")
        ops.close_dialog()
        expect(ops.tile("decode ready")).to_have_text("4 / 4")
        expect(ops.page.locator("#topology .decode").get_by_role("heading", name=name, exact=True)).to_be_visible()
        expect(ops.event(f"asked here to flip {name} to decode")).to_be_visible()
        ops.page.get_by_role("button", name=f"Flip {name}", exact=True).click()
        ops.confirm("Flip")
        ops.close_dialog()
        expect(ops.tile("prefill ready")).to_have_text("3 / 3")
        expect(ops.card(name).get_by_text("both roles")).to_be_hidden()
        ops.page.get_by_role("button", name=f"Flip {name}", exact=True).click()
        expect(ops.dialog.get_by_label("a prefill worker")).to_be_hidden()
        ops.dialog.get_by_label("a worker of both roles").check()
        assert violations(ops.page) == []
        ops.confirm("Flip")
        expect(ops.outcome).to_have_text(f"{name} is a worker of both roles now.")
        ops.close_dialog()
        expect(ops.tile("decode ready")).to_have_text("4 / 4")
        expect(ops.card(name).get_by_text("both roles")).to_be_visible()
        expect(ops.event(f"{name} is a worker of both roles now, and was a prefill worker")).to_be_visible()
        ops.page.get_by_role("button", name=f"Flip {name}", exact=True).click()
        expect(ops.dialog.get_by_label("a worker of both roles")).to_be_hidden()
        ops.dialog.get_by_label("a prefill worker").check()
        ops.confirm("Flip")
        ops.close_dialog()
        expect(ops.tile("prefill ready")).to_have_text("3 / 3")
    cluster.until(lambda: cluster.settled(3, 3), 30)


@pytest.mark.slow
def test_routers_scale_with_confirmation(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    for number, words in ((2, "2 routers"), (1, "1 router")):
        ops.page.get_by_role("button", name="Scale").click()
        expect(ops.dialog.get_by_label("Routers")).to_have_value(str(3 - number))
        ops.dialog.get_by_label("Routers").fill(str(number))
        assert violations(ops.page) == []
        ops.confirm("Scale")
        expect(ops.outcome).to_have_text(f"The cluster is on its way to {words}.")
        ops.close_dialog()
        expect(ops.event(f"{words} wanted")).to_be_visible(timeout=30_000)
        cluster.until(lambda: cluster.ask("GET", "/admin/status").json()["routers"]["ready"] == number, 90)  # noqa: B023
    assert cluster.settled(3, 3), "workers stay as they are"


@pytest.mark.slow
def test_a_worker_starts_anew_and_an_audit_finds_nothing(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    row = next(row for row in cluster.workers() if row["role"] == "prefill")
    name, epoch = row["worker_id"], row["epoch"]
    ops.page.get_by_role("button", name=f"Drain {name}", exact=True).click()
    ops.confirm("Drain")
    expect(ops.outcome).to_have_text(f"{name} drains, then it starts anew.")
    ops.close_dialog()
    expect(ops.card(name)).to_contain_text(re.compile(rf"epoch\s*{epoch + 1}\D"), timeout=60_000)
    expect(ops.card(name)).to_have_attribute("data-state", "ready", timeout=60_000)
    expect(ops.event(f"{name} was drained").or_(ops.event(f"{name} ended"))).to_be_visible()
    ops.page.get_by_role("button", name="Audit").click()
    ops.confirm("Audit")
    expect(ops.outcome).to_contain_text("No leak")
    ops.close_dialog()


@pytest.mark.slow
def test_a_refusal_is_shown_and_can_be_mended(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    ops.page.get_by_role("button", name="Scale").click()
    ops.confirm("Scale")
    expect(ops.outcome).to_have_text("No number was changed here.")
    ops.dialog.get_by_label("Decode workers").fill("999")
    ops.confirm("Scale")
    expect(ops.outcome).to_contain_text("64")
    ops.foresee("status of 400")
    expect(ops.dialog.get_by_role("button", name="Scale", exact=True)).to_be_enabled()
    ops.page.keyboard.press("Escape")
    expect(ops.dialog).to_be_hidden()
    expect(ops.event("refused: ").first).to_be_visible()


@pytest.mark.slow
def test_a_death_is_an_event_with_its_reason(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    victim = cluster.workers()[-1]
    os.kill(victim["pid"], signal.SIGKILL)
    name = victim["worker_id"]
    expect(ops.event(f"{name} ended: ")).to_be_visible(timeout=60_000)
    expect(ops.event(re.compile(f"{name} (ended: .* )?is ready")).first).to_be_visible(timeout=60_000)
    expect(ops.card(name)).to_contain_text(re.compile(r"restarts\s*1\s*\S+"))
    cluster.until(lambda: cluster.settled(3, 3), 60)


@pytest.mark.slow
def test_it_says_when_nobody_answers_and_rests_while_it_is_hidden(cluster: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(cluster)
    ops.live()
    ops.context.set_offline(True)
    expect(ops.pulse).to_have_text("No answer")
    expect(ops.problem).to_contain_text("The server can't be reached.")
    expect(ops.page.get_by_text(re.compile(r"figures are \d+ s old"))).to_be_visible()
    ops.context.set_offline(False)
    ops.live()
    expect(ops.problem).to_be_empty()
    expect(ops.event("answers again, after")).to_be_visible()
    expect(ops.page.get_by_text("s old")).to_have_count(0)
    ops.forgive("ERR_INTERNET_DISCONNECTED")

    ops.page.evaluate(HIDE, True)
    expect(ops.pulse).to_have_text("Paused")
    before = len(ops.requests)
    ops.page.wait_for_timeout(LOOKED_S * 1000)
    assert len(ops.requests) == before
    ops.page.evaluate(HIDE, False)
    ops.live()


@pytest.fixture(scope="module")
def guarded(serve: Callable[..., Any]) -> Any:
    served = serve("--engine", "paced", environment={"TANDEM_ADMIN_KEY": "sesame"})
    served.wait_ready()
    return served


@pytest.mark.slow
def test_the_operators_key_is_asked_for_and_kept_nowhere(guarded: Any, visit: Callable[..., OpsVisit]) -> None:
    ops = visit(guarded)
    field = ops.page.get_by_role("form", name="Operator's key").get_by_role("textbox")
    expect(field).to_be_focused()
    expect(ops.pulse).to_have_text("Key needed")
    expect(ops.problem).to_be_empty()
    assert violations(ops.page) == []
    ops.foresee("status of 401")
    ops.page.keyboard.type("open")
    ops.page.keyboard.press("Enter")
    expect(ops.problem).to_contain_text("operator's key")
    ops.foresee("status of 401")
    expect(field).to_be_focused()
    ops.page.keyboard.type("sesame")
    ops.page.keyboard.press("Enter")
    ops.live()
    expect(field).to_be_hidden()
    assert sorted(ops.workers()) == sorted(row["worker_id"] for row in guarded.workers())
    ops.page.get_by_role("button", name="Audit").click()
    ops.confirm("Audit")
    expect(ops.outcome).to_contain_text("No leak")
    assert not any("sesame" in url for url in [*ops.requests, ops.page.url])
    assert ops.page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]") == [[], [], ""]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390, 320])
def test_everybody_can_use_it(cluster: Any, visit: Callable[..., OpsVisit], scheme: str, width: int) -> None:
    """Nothing that axe-core objects to, nothing wider than the window; dialogs take the focus and give it back."""
    ops = visit(cluster, color_scheme=scheme, viewport={"width": width, "height": 800}, reduced_motion="reduce")
    ops.live()
    with load(cluster.url, 2, max_tokens=20):
        expect(ops.tile("tokens/s out")).to_have_text(re.compile(r"^[1-9]"))
        assert violations(ops.page) == []
    assert ops.page.evaluate("document.documentElement.scrollWidth") <= width
    drain = ops.page.get_by_role("button", name=re.compile("^Drain ")).first
    for button in (ops.page.get_by_role("button", name="Scale"), ops.page.get_by_role("button", name="Audit"), drain):
        button.focus()
        ops.page.keyboard.press("Enter")
        expect(ops.dialog).to_be_visible()
        assert ops.page.evaluate("document.querySelector('dialog[open]').contains(document.activeElement)")
        assert violations(ops.page) == []
        ops.page.keyboard.press("Escape")
        expect(ops.dialog).to_be_hidden()
        expect(button).to_be_focused()


@pytest.mark.slow
@pytest.mark.parametrize("number", [16, 100])
def test_large_clusters_fit(cluster: Any, visit: Callable[..., OpsVisit], number: int) -> None:
    """Of so many workers of each role, made up here; one of them is in trouble."""
    rows = [worker(f"{role}-{index}", running=5) for role in ("prefill", "decode") for index in range(number)]
    rows[3] = unheard("prefill-3", epoch=4, restarts=3, last_error="it was killed by signal 9", quick_ends=3, start_delay_s=8.0)
    answer = json.dumps(status(*rows))

    def answer_status(route: Route) -> None:
        route.fulfill(content_type="application/json", body=answer)

    ops = visit(cluster, viewport={"width": 1400, "height": 900})
    ops.page.route("**/admin/status", answer_status)
    expect(ops.page.locator(".card")).to_have_count(2 * number)
    for role in ("prefill", "decode"):
        assert [name for name in ops.workers() if name.startswith(role)] == [f"{role}-{index}" for index in range(number)]
    expect(ops.card("prefill-3")).to_contain_text("it was killed by signal 9; waits 8 s before it starts")
    assert violations(ops.page) == []
    overflowing = "[...document.querySelectorAll('.card')].filter((each) => each.scrollWidth > each.clientWidth).length"
    assert ops.page.evaluate(overflowing) == 0
    assert ops.page.evaluate("document.documentElement.scrollWidth") <= 1400


@pytest.mark.slow
def test_top_tells_the_same_in_the_terminal(cluster: Any) -> None:
    with load(cluster.url, 6):
        cluster.until(lambda: any(row["running"] for row in cluster.workers()), 30)
        shown = cluster.command("top", "--once")
    assert shown.returncode == 0, shown.stderr
    for row in cluster.workers():
        assert re.search(rf"^{row['worker_id']} +ready +\S+ +\d+%", shown.stdout, re.MULTILINE)
    assert re.search(r"^smollm2   prefill 3/3   decode 3/3   [1-9]\d* running", shown.stdout)
