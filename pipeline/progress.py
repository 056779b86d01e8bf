"""How progress and times are shown, in every step alike."""

LOG_INTERVAL_S = 30.0
"""Where the output is no terminal, a line this often instead of a bar."""


def clock(seconds: float) -> str:
    """724 -> '12:04', 4920 -> '1 h 22'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02d}" if hours else f"{minute}:{second:02d}"


def scaled(number: float) -> str:
    """26_200_000 -> '26.2 M'."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number:.0f} "
