"""Keys: which are good, how the file is read, and what a caller may do."""

from __future__ import annotations

import hmac
import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.commands.lib.key_file import add_key, revoke_key
from configs.schema import TierConfig
from protocol.errors import AuthenticationError, ConfigError, ContextLengthError, InvalidRequestError, NotAllowedError
from protocol.sampling import SamplingParams
from router.access.callers import Caller, anonymous
from router.access.keyring import Keyring
from router.access.keys import ApiKey, check_key, read_key_file
from router.request.generation import Generation
from router.rules.fair_queue import SchedulingClass

TIERS = {"standard": TierConfig(), "small": TierConfig(max_context=100, weight=2.0, priority=3, earliest_priority=-5)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def key_id_of(given: str) -> str:
    return given.split("-")[1]


def test_a_new_key_is_good_and_nothing_secret_is_kept(path: Path) -> None:
    given = add_key(path, {"tenant": "a"})
    prefix, key_id, secret = given.split("-", 2)
    assert prefix == "tk"
    assert Keyring(path, TIERS).caller(given).tenant == "a"
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    other = add_key(path, {"tenant": "a"})
    kept = read_key_file(path).keys
    assert kept[key_id].salt != kept[key_id_of(other)].salt
    assert kept[key_id].digest != kept[key_id_of(other)].digest


def test_a_key_of_another_id_prefix_or_secret_is_refused(path: Path) -> None:
    first, second = (add_key(path, {"tenant": "a"}) for _ in range(2))
    keyring = Keyring(path, TIERS)
    _, id_1, secret_1 = first.split("-", 2)
    _, id_2, _ = second.split("-", 2)
    wrong = ["", "tk", "tk-", f"tk-{id_1}", f"tk-{id_1}-", f"tk-{id_2}-{secret_1}", f"sk-{id_1}-{secret_1}"]
    wrong += [first[:-1], first + "x", first.upper(), f"tk-{'0' * 12}-{secret_1}", "tk-\udcff-\udcff", f"tk-{id_1}-\xfc"]
    for key in wrong:
        with pytest.raises(AuthenticationError, match="not known here"):
            keyring.caller(key)
    assert keyring.caller(first).key_id == id_1


@given(st.text(max_size=40))
def test_arbitrary_text_is_no_key(given_text: str) -> None:
    key = ApiKey(tenant="a", salt="00" * 16, digest="00" * 32, created=datetime.now(UTC))
    for text in (given_text, f"tk-{given_text}", f"tk-aa-{given_text}"):
        with pytest.raises(AuthenticationError):
            check_key({"aa": key}, text, datetime.now(UTC))


def test_the_comparison_takes_the_same_time_for_every_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comparison of two whole digests by hmac.compare_digest, whatever is wrong with the key."""
    given = add_key(path, {"tenant": "a"})
    keyring = Keyring(path, TIERS)
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(left: str, right: str) -> bool:
        compared.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keyring.caller(given)
    for wrong in (given[:-1], "tk-unknown-secret", "nothing"):
        with pytest.raises(AuthenticationError):
            keyring.caller(wrong)
    assert compared == [(64, 64)] * 4


def test_revoked_and_expired_keys_say_so_to_their_owner_alone(path: Path) -> None:
    now = datetime.now(UTC)
    revoked = add_key(path, {"tenant": "a"})
    expired = add_key(path, {"tenant": "a", "expires": now - timedelta(seconds=1)})
    soon = add_key(path, {"tenant": "a", "expires": now + timedelta(hours=1)})
    keyring = Keyring(path, TIERS)
    assert keyring.caller(revoked).tenant == "a"
    revoke_key(path, key_id_of(revoked))
    for key, says in ((revoked, "was revoked"), (expired, "expired at")):
        with pytest.raises(AuthenticationError, match=says):
            keyring.caller(key)
        with pytest.raises(AuthenticationError, match="not known"):
            keyring.caller(key[:-1])
    assert keyring.caller(soon).tenant == "a"
    keys = read_key_file(path).keys
    with pytest.raises(AuthenticationError, match="expired"):
        check_key(keys, soon, now + timedelta(hours=1))


def test_a_changed_file_counts_from_the_next_request_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = add_key(path, {"tenant": "a"})
    keyring = Keyring(path, TIERS)
    second = add_key(path, {"tenant": "b"})
    assert keyring.caller(second).tenant == "b"
    good = path.read_bytes()
    path.write_text("{broken")
    assert keyring.caller(first).tenant == "a", "what was good stays good"
    path.unlink()
    assert keyring.caller(first).tenant == "a"
    assert len([record for record in caplog.records if "stay as they were" in record.message]) == 2, "said once each"
    assert not any(part in caplog.text for part in (first.split("-", 2)[2], second.split("-", 2)[2]))
    path.write_bytes(good)
    revoke_key(path, key_id_of(first))
    with pytest.raises(AuthenticationError):
        keyring.caller(first)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "EOF"),
        ("[]", "object"),
        ('{"version": 2}', "version"),
        ('{"keys": []}', "keys"),
        ('{"keys": {}, "more": 1}', "more"),
    ],
)
def test_a_bad_file_is_refused_at_the_start(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as refused:
        Keyring(path, TIERS)
    assert refused.value.param == "http.keys_file"


def test_edits_from_many_threads_all_count(path: Path) -> None:
    given: list[str] = []

    def edit(number: int) -> None:
        mine = [add_key(path, {"tenant": f"t{number}"}) for _ in range(5)]
        revoke_key(path, key_id_of(mine[0]))
        given.extend(mine)

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    keys = read_key_file(path).keys
    assert keys.keys() == {key_id_of(key) for key in given}
    assert sum(key.revoked is not None for key in keys.values()) == 8
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_an_edit_that_fails_changes_nothing(path: Path) -> None:
    add_key(path, {"tenant": "a"})
    before = path.read_bytes()
    for values in ({"tenant": "a/b"}, {"tenant": ""}, {"tenant": "a", "tokens_per_minute": 0}):
        with pytest.raises(ConfigError):
            add_key(path, values)
    with pytest.raises(ConfigError, match="has no key"):
        revoke_key(path, "nobody")
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="No such file"):
        revoke_key(path.with_name("other.json"), "nobody")
    with pytest.raises(ConfigError, match="can't be written"):
        add_key(path.parent / "nowhere" / "keys.json", {"tenant": "a"})


def test_who_could_read_the_file_reads_a_revocation(path: Path) -> None:
    """Such as the user of a container, after `chmod 644`."""
    leaked = add_key(path, {"tenant": "a"})
    for mode in (0o644, 0o640, 0o600):
        path.chmod(mode)
        add_key(path, {"tenant": "a"})
        assert stat.S_IMODE(path.stat().st_mode) == mode
    if os.getuid() == 0:
        os.chown(path, 12345, 23456)
    before = path.stat()
    revoke_key(path, key_id_of(leaked))
    after = path.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert after.st_ino != before.st_ino


def test_a_group_that_can_not_be_kept_hands_its_rights_to_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, {"tenant": "a"})
    path.chmod(0o664)

    def refused(descriptor: int, owner: int, group: int) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(os, "fchown", refused)
    add_key(path, {"tenant": "a"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


TENANT = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,8}\Z")


@given(TENANT, st.text(max_size=8), TENANT, st.text(max_size=8))
def test_no_two_tenants_can_get_the_same_salt(tenant: str, salt: str, other: str, other_salt: str) -> None:
    same = caller(tenant).salted(salt) == caller(other).salted(other_salt)
    assert same == ((tenant, salt) == (other, other_salt))
    assert caller(tenant).salted(salt) != salt


def test_models_context_and_priority() -> None:
    limited = caller("a", "small", models=("m",), max_context=200)
    limited.check_model("m")
    with pytest.raises(NotAllowedError):
        limited.check_model("n")
    assert limited.max_context == 100, "the smaller of the two"
    assert limited.scheduling_class(-5) == SchedulingClass("a", 2.0, -2)
    with pytest.raises(InvalidRequestError, match="at least -5 with an API key of tier small"):
        limited.scheduling_class(-6)
    assert limited.fit(generation(60, 40), 40, "prompt").sampling.max_tokens == 40
    assert limited.fit(generation(60, 1000), None, "prompt").sampling.max_tokens == 40
    for prompt, answer, wanted, min_tokens, param in (
        (60, 41, 41, 0, "max_tokens"),
        (100, 1, None, 0, "messages"),
        (99, 50, None, 2, "max_tokens"),
    ):
        with pytest.raises(ContextLengthError) as refused:
            limited.fit(generation(prompt, answer, min_tokens), wanted, "messages")
        assert refused.value.param == param
    free = anonymous(TIERS)
    assert free.fit(generation(60, 10**6), None, "prompt").sampling.max_tokens == 10**6
    assert free.may_use("anything")
    assert free.scheduling_class(7) == SchedulingClass("", 1.0, 7), "whoever wants to may wait"
    assert free.salted("own") == "own"


def caller(tenant: str, tier: str = "standard", **limits: Any) -> Caller:
    key = ApiKey(tenant=tenant, tier=tier, salt="00" * 16, digest="00" * 32, created=datetime.now(UTC), **limits)
    return Caller(tenant, tier, TIERS[tier], "id", key)


def generation(num_prompt_tokens: int, max_tokens: int, min_tokens: int = 0) -> Generation:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, min_tokens=min_tokens)
    return Generation((1,) * num_prompt_tokens, sampling, (), "", 1, None)


def test_the_file_is_plain_json(path: Path) -> None:
    add_key(path, {"tenant": "a", "models": ("m",), "requests_per_minute": 5})
    [entry] = json.loads(path.read_text())["keys"].values()
    assert (entry["tenant"], entry["models"], entry["requests_per_minute"], entry["tier"]) == ("a", ["m"], 5, "standard")
