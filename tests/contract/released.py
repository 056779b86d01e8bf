"""speculators as released, got back from the patched installation: by reversing the patches, and checking hashes.

So the tests need no network, and run where the package is installed patched (CI) or pristine.
"""

import csv
import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

from pipeline import patching

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "speculators"

RELEASED = {
    "speculators/data_generation/custom_worker.py": "sha256=6alc9kIvo-Pvs-22WOSJi6I-4UFhn1jXCW6n-96K9Ug",
    "speculators/data_generation/vllm_hidden_states_generator.py": "sha256=UU8_WFr6M1tVj5jBlUodxbgEADzXsIrurHxM0zPNUQY",
}
"""From the RECORD of speculators-0.3.0-py3-none-any.whl."""


def make_site(folder: Path) -> Path:
    """A site-packages folder that holds the released package and nothing else."""
    spec = util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    info = next(package.parent.glob("speculators-*.dist-info"))
    shutil.copytree(package, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(info, folder / info.name)
    if (folder / info.name / patching.STATE_NAME).exists():
        reverse(folder)
        (folder / info.name / patching.STATE_NAME).unlink()
    _restore_record(folder / info.name / "RECORD")
    for path, expected in RELEASED.items():
        assert patching._record_hash(folder / path) == expected, f"{path} is not as released"
    return folder


def reverse(folder: Path) -> None:
    for patch in reversed(patching.load_patch_set(PACKAGE).patches):
        subprocess.run(
            ["patch", "-p1", "--reverse", "--fuzz=0", "--batch", "--no-backup-if-mismatch", "-i", patch.path],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )


def _restore_record(record: Path) -> None:
    """RECORD without what lies elsewhere (the command in bin/) and without our rows."""
    site = record.parent.parent
    rows = [row for row in csv.reader(record.read_text().splitlines()) if (site / row[0]).exists()]
    for row in rows:
        if row[0] in RELEASED:
            row[1:] = [RELEASED[row[0]], str((site / row[0]).stat().st_size)]
    with record.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def run(site: Path, *arguments: str, tool: Path = ROOT / "pipeline/patching.py", **environment: str):
    """pipeline/patching.py as a user runs it, on a site-packages folder of ours."""
    return subprocess.run(
        [sys.executable, str(tool), *arguments],
        env=os.environ | {"PYTHONPATH": str(site)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def contents(site: Path) -> dict[str, bytes]:
    """Every file below a folder, compiled ones left out."""
    return {
        str(path.relative_to(site)): path.read_bytes()
        for path in sorted(site.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
