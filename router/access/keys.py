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
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

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
    """One of the configuration's `tiers`."""
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    """Tokens of prompts and answers together."""
    max_context: _Count | None = None
    """The most tokens that prompt and answer of one request may have together."""
    models: tuple[str, ...] | None = None


class KeyFile(BaseModel):
    """The file of API keys, which is JSON: the entries by key id."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    keys: dict[str, ApiKey] = {}


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
    """Read the file of keys. Raises ConfigError if that fails, with a message that repeats nothing of what the file holds."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}", param="http.keys_file") from None
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise ConfigError(f"{path}: is no file of keys: {problem}", param="http.keys_file") from None


def render_key_file(file: KeyFile) -> bytes:
    """Return the file's content as `read_key_file` reads it."""
    return json.dumps(file.model_dump(mode="json", exclude_none=True), indent=1, sort_keys=True).encode() + b"\n"


def _digest(secret: str, salt: str) -> str:
    data = secret.encode(errors="surrogatepass")
    return hashlib.blake2b(data, salt=bytes.fromhex(salt), digest_size=32).hexdigest()
