"""What is made of the measurements: rates, medians, the target, the table."""

from dataclasses import asdict, dataclass
from typing import Any

PREFILL_SHARE, DISK_SHARE = 0.95, 0.9
"""The target of `extract` to disk: the lower of so much of prefill, and of what the disk sustains with fsync."""


@dataclass(frozen=True)
class Measured:
    """One phase, once. `tokens` went through the model and `size_bytes` to files in `seconds`: from the moment when the
    engine is ready, which takes `start_s` (s), to the last one; the first states came after `first_s` of them (s).

    None where the phase has no such thing: prefill keeps no states, the disk has no engine.
    """

    phase: str
    seconds: float
    tokens: int = 0
    size_bytes: int = 0
    files: int = 0
    start_s: float | None = None
    first_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens else None

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes a second."""
        return self.size_bytes / 1e9 / self.seconds if self.size_bytes else None

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s, "gb_per_s": self.gb_per_s}


@dataclass(frozen=True)
class Goal:
    """What extraction to disk should reach, in tokens per second, what bounds it, and what it did reach."""

    prefill_tokens_per_s: float
    disk_tokens_per_s: float
    """What the disk sustains, in states of tokens."""
    reached_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return min(PREFILL_SHARE * self.prefill_tokens_per_s, DISK_SHARE * self.disk_tokens_per_s)

    @property
    def is_reached(self) -> bool:
        return self.reached_tokens_per_s >= self.tokens_per_s

    def text(self) -> str:
        """One line."""
        prefill, disk = PREFILL_SHARE * self.prefill_tokens_per_s, DISK_SHARE * self.disk_tokens_per_s
        lower = "prefill" if prefill <= disk else "the disk"
        return (
            f"to disk at least {self.tokens_per_s:,.0f} tok/s, the lower of {PREFILL_SHARE} prefill ({prefill:,.0f}) "
            f"and {DISK_SHARE} of what the disk sustains with fsync ({disk:,.0f}): bounded by {lower}, "
            f"{'reached' if self.is_reached else 'MISSED'} with {self.reached_tokens_per_s:,.0f}"
        )


def told(one: Measured) -> str:
    """A phase in a line, as soon as it has run."""
    said = [
        _shown(one.tokens_per_s, ",.0f", " tok/s"),
        _shown(one.gb_per_s, ".3f", " GB/s"),
        _shown(one.first_s, ".2f", " s to the first states"),
        _shown(one.start_s, ".1f", " s to start the engine"),
    ]
    return f"{one.phase}  {', '.join(text for text in said if text != '-')}"


def medians(runs: list[Measured]) -> list[Measured]:
    """Of each phase, in the order of its first run, the run of median speed (of an even number the slower one)."""
    chosen: list[Measured] = []
    for phase in dict.fromkeys(run.phase for run in runs):
        by_time = sorted((run for run in runs if run.phase == phase), key=lambda run: run.seconds)
        chosen.append(by_time[len(by_time) // 2])
    return chosen


def goal_of(measured: list[Measured]) -> Goal | None:
    """The target, where prefill, extraction to disk and the disk were measured; else None."""
    by_phase = {run.phase: run for run in measured}
    prefill, stream, disk = (by_phase.get(name) for name in ("prefill", "stream-disk", "disk"))
    if not (prefill and stream and disk):
        return None
    bytes_per_token = stream.size_bytes / stream.tokens
    return Goal(
        prefill.tokens / prefill.seconds,
        disk.size_bytes / disk.seconds / bytes_per_token,
        stream.tokens / stream.seconds,
    )


def table(measured: list[Measured], runs: list[Measured]) -> str:
    """A line a phase; `runs` are all of them, for the spread of several."""
    prefill = next((run.tokens_per_s for run in measured if run.phase == "prefill"), None)
    several = len(runs) > len(measured)
    names = ["phase", "tok/s", "of prefill", "first states", "GB/s", "engine starts"]
    rows = [[*names, "tok/s or GB/s of all"] if several else names]
    for one in measured:
        rate = one.tokens_per_s
        row = [
            one.phase,
            _shown(rate, ",.0f"),
            _shown(rate / prefill if rate and prefill else None, ".3f"),
            _shown(one.first_s, ".2f", " s"),
            _shown(one.gb_per_s, ".3f"),
            _shown(one.start_s, ".1f", " s"),
        ]
        rows.append([*row, _spread([run for run in runs if run.phase == one.phase])] if several else row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def _spread(runs: list[Measured]) -> str:
    """Lowest and highest rate."""
    rates = sorted(run.tokens_per_s or run.gb_per_s or 0.0 for run in runs)
    form = ",.0f" if runs[0].tokens else ".3f"
    return f"{rates[0]:{form}} to {rates[-1]:{form}}"


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
