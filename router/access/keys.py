"""API keys: what a key is, the file that holds them, and whether one that a client sends is good.

A key is `tk-<id>-<secret>`. The file has, by id, a salt and a hash of the secret, and what the key may do; no secret. The
secret is 32 random bytes, so a fast hash will do: there is nothing to guess, and a slow one (scrypt) would hold up the router
for each request. The file is written by `tandem keys` (cluster/commands/lib/key_file.py) and read by every router.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from configs.schema import DEFAULT_TIER
from protocol.errors import AuthenticationError, ConfigError

_PREFIX = "tk"
_SECRET_BYTES = 32
_SALT_BYTES = 16  # of blake2b
_ID_BYTES = 6
_NO_SALT, _NO_DIGEST = "00" * _SALT_BYTES, "00" * 32

Tenant = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of a tenant. It has no slash, because cache salts are a tenant's name, a slash, and the request's salt."""
_Count = Annotated[int, Field(gt=0, le=10**12)]


class ApiKey(BaseModel):
    """One entry of the file of keys. A limit that is None does not exist."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tenant: Tenant
    """Whose key it is: tenants share neither cached prefixes nor places in line."""
    tier: str = DEFAULT_TIER
    """Name of the key's tier, one of the configuration's `tiers`."""
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    """Tokens of prompts and answers together."""
    tokens_per_month: _Count | None = None
    """Tokens of prompts and answers in a calendar month, in UTC. The cluster needs a usage log for it."""
    max_running_requests: _Count | None = None
    """Answers that may be under way at a time, at each router; those that wait in line count too."""
    max_context: _Count | None = None
    """The most tokens that prompt and answer of one request may have together."""
    models: tuple[str, ...] | None = None


class _Document(BaseModel):
    """The file as a whole. Each entry is checked by itself, so that a bad one harms no other."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    keys: dict[str, JsonValue] = {}


@dataclass(frozen=True)
class KeyFile:
    """What the file of API keys says, by key id."""

    keys: Mapping[str, ApiKey]
    skipped: Mapping[str, str]
    """What is wrong with each entry that is no key. A client that gives such a key is refused."""


def new_secret() -> tuple[str, str, str, str]:
    """Make a new key. Return the key, which its owner sees once, its id, and the salt and the digest that are kept."""
    key_id, secret, salt = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES), secrets.token_bytes(_SALT_BYTES)
    return f"{_PREFIX}-{key_id}-{secret}", key_id, salt.hex(), _digest(secret, salt.hex())


def check_key(keys: Mapping[str, ApiKey], given: str, now: datetime) -> tuple[str, ApiKey]:
    """Return id and entry of the key that a client gave.

    Raises AuthenticationError for an unknown, revoked or expired key. Only who knows the secret learns which it is.
    """
    prefix, _, rest = given.partition("-")
    key_id, _, secret = rest.partition("-")
    key = keys.get(key_id)
    # An unknown id costs the same hash and the same comparison as a known one with a wrong secret.
    salt, digest = (key.salt, key.digest) if key is not None else (_NO_SALT, _NO_DIGEST)
    right = hmac.compare_digest(_digest(secret, salt), digest)
    if key is None or not right or prefix != _PREFIX:
        raise AuthenticationError("this API key is not known here")
    if key.revoked is not None:
        raise AuthenticationError(f"the API key {key_id} was revoked")
    if key.expires is not None and key.expires <= now:
        raise AuthenticationError(f"the API key {key_id} expired at {key.expires.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC")
    return key_id, key


def read_key_file(path: Path) -> KeyFile:
    """Read the file of keys, without the entries that are wrong.

    Raises ConfigError if it is no file of keys at all, with a message that repeats nothing of what the file holds.
    """
    keys: dict[str, ApiKey] = {}
    skipped: dict[str, str] = {}
    for key_id, entry in read_entries(path).items():
        try:
            keys[key_id] = ApiKey.model_validate_json(json.dumps(entry))
        except ValidationError as invalid:
            skipped[key_id] = _first_problem(invalid)
    return KeyFile(keys, skipped)


def read_entries(path: Path) -> dict[str, JsonValue]:
    """Read the entries of the file by key id, as JSON and unchecked. Raises ConfigError as `read_key_file`."""
    try:
        return _Document.model_validate_json(path.read_bytes()).keys
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}", param="http.keys_file") from None
    except ValidationError as invalid:
        raise ConfigError(f"{path}: is no file of keys: {_first_problem(invalid)}", param="http.keys_file") from None


def render_entries(entries: Mapping[str, JsonValue]) -> bytes:
    """Return the content of a file with these entries, as `read_entries` reads it."""
    return json.dumps({"version": 1, "keys": dict(entries)}, indent=1, sort_keys=True).encode() + b"\n"


def new_entry(key: ApiKey) -> JsonValue:
    """Return the entry that stands for this key in the file."""
    entry: JsonValue = key.model_dump(mode="json", exclude_none=True)
    return entry


def _first_problem(invalid: ValidationError) -> str:
    first = invalid.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def _digest(secret: str, salt: str) -> str:
    data = secret.encode(errors="surrogatepass")
    return hashlib.blake2b(data, salt=bytes.fromhex(salt), digest_size=32).hexdigest()
