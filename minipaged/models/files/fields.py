"""Fields: typed reading of a model's configuration, with errors that say where to look."""

from __future__ import annotations

from collections.abc import Mapping

from minipaged.errors import ModelLoadError


class Fields:
    """Keys and values of a configuration file. A value of null counts as absent.

    Args:
        values: the keys and their plain values.
        where: what error messages call it: the file, and the key that holds `values` if they are not its top level.

    Raises:
        ModelLoadError: by any method, where a value is absent and has no default, or is not what is expected.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str) -> object:
        """The value, whatever it is; None if absent."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """An integer of at least `at_least`; every size and id of a model is an int32."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**31:
            raise self.wrong(key, f"an integer of at least {at_least}, below 2**31")
        return value

    def number(
        self, key: str, default: float | None = None, *, at_least: float = 0.0, above: float | None = None
    ) -> float:
        """A number of at least `at_least`, or more than `above`, below 2**31 as sizes are."""
        value = self._or_default(key, default)
        low = at_least if above is None else above
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < 2**31 or value == above:
            raise self.wrong(key, f"a number {'of at least' if above is None else 'above'} {low:g}, below 2**31")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._or_default(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._or_default(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def within(self, key: str) -> Fields | None:
        """The object under a key; None if it is absent or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object with keys of its own")
        return Fields(value, f"{self.where}, {key}")

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        """The error for a key that does not hold what is expected."""
        found = f"is {self.values[key]!r:.80}" if key in self.values else "is missing"
        return ModelLoadError(f"{self.where}: {key} {found}; expected {expected}.")

    def _or_default(self, key: str, default: object) -> object:
        value = self.get(key)
        return default if value is None else value
