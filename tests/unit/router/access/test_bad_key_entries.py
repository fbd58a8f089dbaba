"""A file of keys with entries that nobody can read: the others count, revocations among them, and operators are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.commands.lib.key_file import add_key, revoke_key
from cluster.commands.lib.tables import print_status
from configs.schema import HttpConfig, TierConfig
from protocol.errors import AuthenticationError, ConfigError
from router.access import keyring
from router.access.keyring import Keyring, check_key_file

Run = Callable[..., None]
TIERS = {"standard": TierConfig()}
WRONG: list[Any] = [{}, None, 17, "x", [], {"tenant": "a"}, {"tenant": "a/b", "salt": "", "digest": "", "created": "never"}]


def edit(path: Path, **entries: Any) -> None:
    """Put these entries into the file, as an editor would."""
    file = json.loads(path.read_text())
    file["keys"] |= entries
    path.write_text(json.dumps(file))


def break_file(path: Path) -> None:
    path.write_text("{broken")


def key_id_of(given: str) -> str:
    return given.split("-")[1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_one_bad_entry_keeps_no_revocation_from_taking_effect(path: Path, wrong: Any) -> None:
    kept, leaked = (add_key(path, {"tenant": "a"}) for _ in range(2))
    ring = Keyring(path, TIERS)
    assert ring.caller(leaked).tenant == "a"
    edit(path, bad=wrong)
    assert ring.caller(leaked).tenant == "a"
    revoke_key(path, key_id_of(leaked))
    with pytest.raises(AuthenticationError, match="was revoked"):
        ring.caller(leaked)
    assert ring.caller(kept).tenant == "a"
    later = add_key(path, {"tenant": "b"})
    assert ring.caller(later).tenant == "b"
    assert json.loads(path.read_text())["keys"]["bad"] == wrong, "edits of others leave it as it is"
    assert list(ring.state().skipped) == ["bad"]
    assert ring.state().num_keys == 3


def test_a_key_whose_own_entry_went_bad_is_refused(path: Path) -> None:
    given, other = (add_key(path, {"tenant": "a"}) for _ in range(2))
    ring = Keyring(path, TIERS)
    entry = json.loads(path.read_text())["keys"][key_id_of(given)]
    for change in ({"revoked": "yes"}, {"tier": "gold"}, {"later_field": 1}):
        edit(path, **{key_id_of(given): entry | change})
        with pytest.raises(AuthenticationError, match="not known"):
            ring.caller(given)
        assert ring.caller(other).tenant == "a"
        revoke_key(path, key_id_of(given)) if "revoked" not in change else None
    edit(path, **{key_id_of(given): entry})
    assert ring.caller(given).tenant == "a", "mended"


def test_the_start_names_the_entry_that_is_wrong(path: Path) -> None:
    add_key(path, {"tenant": "a", "tier": "gold"})
    with pytest.raises(ConfigError, match=r"keys\.\w+: it is of tier 'gold', but the configuration has standard"):
        check_key_file(path, TIERS)
    path.write_text('{"keys": {"x": {}}}')
    with pytest.raises(ConfigError, match=r"keys\.x: tenant"):
        check_key_file(path, TIERS)


def test_metrics_and_status_tell_operators(
    run_cluster: Run, path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    key = add_key(path, {"tenant": "a"})

    async def test(cluster: Any) -> None:
        async def shown() -> tuple[list[str], Any]:
            lines = (await cluster.http.get("/metrics")).text.splitlines()
            status = (await cluster.http.get("/admin/status", headers={"authorization": "Bearer sesame"})).json()
            print_status(status)
            return [line.split("} ")[1] for line in lines if line.startswith("tandem:api_keys_")], status["api_keys"]

        assert await shown() == (["0.0", "0.0"], {"read": 1, "skipped": {}, "problem": None})
        edit(path, bad={"tenant": "a"})
        values, keys = await shown()
        assert values == ["1.0", "0.0"]
        assert keys["skipped"].keys() == {"bad"}
        break_file(path)
        values, keys = await shown()
        assert values == ["1.0", "1.0"]
        assert "no file of keys" in keys["problem"]
        cluster.http.headers["authorization"] = f"Bearer {key}"
        assert (await cluster.complete()).status_code == 200

    run_cluster(test, http=HttpConfig(keys_file=str(path), admin_key="sesame").model_dump())
    said = capsys.readouterr().out
    assert "API key bad is refused: salt: Field required" in said
    assert "API keys stay as they were: " in said
    assert key.split("-", 2)[2] not in said + caplog.text


def unreadable(path: Path) -> None:
    raise ConfigError(f"{path}: Permission denied", param="http.keys_file")


def test_a_file_that_gets_another_owner_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root replaces the file, and gives it away in a second step."""
    given = add_key(path, {"tenant": "a"})
    now = Keyring(path, TIERS)
    revoke_key(path, key_id_of(given))
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(keyring, "read_key_file", unreadable)
        assert now.caller(given).tenant == "a"
    path.chmod(0o640)
    with pytest.raises(AuthenticationError, match="was revoked"):
        now.caller(given)
    assert now.state().problem is None


def test_a_file_that_could_not_be_read_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The router had no file descriptor left, say."""
    given = add_key(path, {"tenant": "a"})
    now = Keyring(path, TIERS)
    revoke_key(path, key_id_of(given))
    monkeypatch.setattr(keyring, "_AGAIN_S", 0.0)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(keyring, "read_key_file", unreadable)
        for _ in range(5):
            assert now.caller(given).tenant == "a"
    with pytest.raises(AuthenticationError, match="was revoked"):
        now.caller(given)
    assert caplog.text.count("stay as they were") == 1
