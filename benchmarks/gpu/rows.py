"""What a part of the benchmark reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, and what it is held against: a limit of the machine, or another program, in the same run."""

    what: str
    value: float | None = None
    """None: not measured; `note` says why."""
    unit: str = ""
    against: str = ""
    """What `other` is of."""
    other: float | None = None
    """In the same unit."""
    bar: float | None = None
    """The least share of `other` that is wanted."""
    note: str = ""

    @property
    def share(self) -> float | None:
        """Of `other`."""
        return None if self.value is None or not self.other else self.value / self.other

    @property
    def verdict(self) -> str:
        """Whether the bar is reached; empty if there is none, or nothing to hold against it."""
        if self.bar is None or self.share is None:
            return ""
        return "reached" if self.share >= self.bar else "MISSED"

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "share": self.share}


def row_from_json(fields: dict[str, object]) -> Row:
    """Back from `Row.to_json`."""
    return Row(**{name: value for name, value in fields.items() if name != "share"})  # type: ignore[arg-type]
