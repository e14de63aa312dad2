"""Reads typed values of a Hugging Face config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metainfer.ir.errors import Unsupported

_MISSING = object()


@dataclass(frozen=True)
class ConfigReader:
    """Reads typed values of one config, with errors that name the key."""

    config: Mapping[str, Any]
    origin: str

    def unsupported(self, what: str, advice: str) -> Unsupported:
        """An error about the config."""
        kind = self.config.get("model_type")
        return Unsupported(f"model type {kind!r}: {what}", origin=self.origin, advice=advice)

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """A value; null counts as absent.

        Raises: Unsupported if it is absent and there is no default.
        """
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.unsupported(f"the config has no {key!r}", "take the model's own config.json")
        return default

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], wanted: str) -> Any:
        value = self.get(key, default)
        if not isinstance(value, kinds) or (bool not in kinds and isinstance(value, bool)):
            raise self.unsupported(f"{key} is {value!r}", f"wanted {wanted}")
        return value

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """A whole number."""
        return int(self._typed(key, default, (int,), "an integer"))

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A number."""
        return float(self._typed(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value."""
        return bool(self._typed(key, default, (bool,), "true or false"))
