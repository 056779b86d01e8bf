"""Which engine and which patches make the states: both are part of the run key."""

from pipeline import engine, patching
from pipeline.errors import InputError


def engine_versions() -> dict[str, str]:
    """`engine_version` and `patches`. Raises InputError unless our patch set is applied, whole and unaltered."""
    try:
        patching.run("verify", "speculators")
        return {"engine_version": engine.version(), "patches": patching.patch_set_digest("speculators")}
    except patching.PatchingError as error:
        raise InputError(f"extract: {error}. `make setup` does it") from None
