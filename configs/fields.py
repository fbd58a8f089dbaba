"""Checked reading of key-value pairs from a file that somebody else wrote: config.json, GGUF metadata.

Every value is looked at before it is used; what is missing or of the wrong kind is a ConfigError that names file and key.
A JSON null counts as missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError

_REQUIRED: Any = object()
_MOST = 2**63


def model_error(message: str) -> ConfigError:
    """Return the error for a model that can't be used, whatever its files are."""
    return ConfigError(message, param="model")


def read_json(path: Path) -> Fields:
    """Return the JSON object in a file. Raises ConfigError for anything else."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise model_error(f"{path}: no such file") from None
    except OSError as error:
        raise model_error(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise model_error(f"{path}: not valid JSON") from None
    if not isinstance(values, dict):
        raise model_error(f"{path}: should hold a JSON object, not a {type(values).__name__}")
    return Fields(str(path), values)


class Fields:
    """A mapping whose values are read by kind.

    Each reader takes a default for keys that may be absent. Without a default it raises ConfigError for an absent key, and in
    any case for a value of another kind.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self._source = source
        self._values = values

    @property
    def source(self) -> str:
        """The file, and the section in it, as errors name them."""
        return self._source

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def given(self, key: str) -> bool:
        """Tell whether a key is there, be it with null."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """Return the value as it is, or None if it is absent."""
        return self._values.get(key)

    def count(self, key: str, default: int = _REQUIRED) -> int:
        """Return a positive integer, below 2**63."""
        value = self._value(key, default)
        if type(value) is not int or not 1 <= value < _MOST:
            raise self.wrong(key, "a positive integer")
        return value

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        """Return an integer that is not negative."""
        value = self._value(key, default)
        if type(value) is not int or value < 0:
            raise self.wrong(key, "an integer from 0 on")
        return value

    def positive(self, key: str, default: float = _REQUIRED) -> float:
        """Return a positive, finite number."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, "a positive number")
        return float(value)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """Return a finite number that is not negative."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            raise self.wrong(key, "a number from 0 on")
        return float(value)

    def text(self, key: str, default: str = _REQUIRED) -> str:
        """Return the string under `key`, or the default. Raises ConfigError for any other type."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        """Return the boolean under `key`, or the default. Raises ConfigError for any other type."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def texts(self, key: str, default: tuple[str, ...] = _REQUIRED) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self._value(key, default)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def integers(self, key: str, default: tuple[int, ...] = _REQUIRED) -> tuple[int, ...]:
        """Return a list of integers. A single integer counts as a list of one, as token ids may be given so."""
        value = self._value(key, default)
        items = value if isinstance(value, list | tuple) else [value]
        if not all(type(item) is int for item in items):
            raise self.wrong(key, "an integer or a list of integers")
        return tuple(items)

    def section(self, key: str) -> Fields:
        """Return a nested object, which is empty if it is absent."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(f"{self._source}: {key}", value)

    def refuse_unknown(self, known: Collection[str], whose: str) -> None:
        """Raise ConfigError, which names the key, if there is another than the `known` ones of `whose` kind."""
        for key in self._values:
            if key in self and key not in known:
                raise model_error(f"{self._source}: {key!s:.40} is no key of {whose}, which has {', '.join(known)}")

    def wrong(self, key: str, expected: str) -> ConfigError:
        """Return the error for a value that can't be used; `expected` says what would be right."""
        return model_error(f"{self._source}: {key} should be {expected}, not {_shown(self._values.get(key))}")

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise model_error(f"{self._source}: {key} is missing")
        return default


def _shown(value: Any) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
