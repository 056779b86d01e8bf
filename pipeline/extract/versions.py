"""Which engine and which patches make the states: both are part of the run key."""

from pipeline import engine, patching
from pipeline.errors import InputError


def engine_versions() -> dict[str, str]:
    """`engine_version` (patches/vllm included) and `patches`. Raises InputError unless our patches to speculators are
    applied, whole and unaltered."""
    try:
        patching.run("verify", "speculators")
        return {"engine_version": engine.identity(), "patches": patching.patch_set_digest("speculators")}
    except patching.PatchingError as error:
        raise InputError(f"extract: {error}. `make setup` does it") from None
