"""Files: atomic writes, manifests, checksums. No other module opens a file of a run for writing.

A step's folder is input for the next one only when its `manifest.json` is there and valid; that file
is written last. While a step works, `plan.json` says with which settings, so that a second run with
other settings is refused before it touches anything.
"""

from pipeline.store.atomic import (
    atomic_folder,
    atomic_path,
    file_sha256,
    require_space,
    write_bytes,
    write_json,
    writing,
)
from pipeline.store.locks import exclusive, exclusive_part, remove_part_locks, waiting
from pipeline.store.manifest import Manifest, Shard, claim, finish, read_manifest, release, run_key, verify

__all__ = [
    "Manifest",
    "Shard",
    "atomic_folder",
    "atomic_path",
    "claim",
    "exclusive",
    "exclusive_part",
    "file_sha256",
    "finish",
    "read_manifest",
    "release",
    "remove_part_locks",
    "require_space",
    "run_key",
    "verify",
    "waiting",
    "write_bytes",
    "write_json",
    "writing",
]
