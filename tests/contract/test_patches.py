"""The patch series, and the tool that applies it: states, refusals, and what a kill leaves."""

import base64
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import patching
from tests.contract import released
from tests.contract.released import PACKAGE, RELEASED, ROOT, contents, run

SERIES = patching.load_patch_set(PACKAGE)
VLLM_SERIES = patching.load_patch_set("vllm")
INFO = "speculators-0.3.0.dist-info"
GENERATOR = "speculators/data_generation/vllm_hidden_states_generator.py"


@pytest.mark.parametrize("patch", [*SERIES.patches, *VLLM_SERIES.patches], ids=lambda patch: patch.path.stem)
def test_each_patch_says_what_why_and_until_when(patch: patching.Patch) -> None:
    """A reader must learn from the header why a patch is there and when it can go."""
    assert re.fullmatch(r"[a-z0-9-]+\.patch", patch.path.name), "the name states the intention, in words"
    summary, _, reason = patch.header["Description"].partition("\n")
    assert 20 <= len(summary) <= 90
    assert len(reason) > 100
    both_builds = "vllm 0.16.0, 0.16.0rc2.dev344+gea5f903f8"
    assert patch.header["Applies-To"] == ("speculators 0.3.0" if patch in SERIES.patches else both_builds)
    assert patch.header["Origin"].split(",")[0] in ("other", "backport", "upstream")
    assert re.match(r"0\.\d+\.\d+", patch.header["Applied-Upstream"])
    assert all(len(line) <= 100 for line in patch.path.read_text().partition("\n---\n")[0].splitlines())


def test_the_four_of_the_mission_come_first() -> None:
    said = [patch.path.read_text() for patch in SERIES.patches[:4]]
    for word, text in zip(
        ("trust_remote_code", "is_encoder_decoder", "KimiK|Kimi", "kv_cache_specs"), said, strict=True
    ):
        assert re.search(word, text)


def test_each_patch_applies_without_fuzz_or_offset_and_reverses(released_site: Path, tmp_path: Path) -> None:
    site = Path(shutil.copytree(released_site, tmp_path / "site"))
    for patch in SERIES.patches:
        patching.run_patch(site, patch.path)
    released.reverse(site)
    assert contents(site) == contents(released_site)


def test_an_offset_is_refused(released_site: Path, tmp_path: Path) -> None:
    """GNU patch accepts one even with --fuzz=0, and exits 0."""
    site = Path(shutil.copytree(released_site, tmp_path / "site"))
    (site / GENERATOR).write_text("\n\n" + (site / GENERATOR).read_text())
    with pytest.raises(patching.PatchingError, match="does not apply exactly"):
        patching.run_patch(site, SERIES.patches[0].path)


def test_fuzz_is_refused(released_site: Path, tmp_path: Path) -> None:
    site = Path(shutil.copytree(released_site, tmp_path / "site"))
    text = (site / GENERATOR).read_text()
    (site / GENERATOR).write_text(
        text.replace("        self.model_path = model_path\n", "        self.path = model_path\n")
    )
    with pytest.raises(patching.PatchingError, match="does not apply exactly"):
        patching.run_patch(site, SERIES.patches[0].path)


def test_pristine_applied_and_applied_again(site: Path) -> None:
    states = [run(site, action, PACKAGE) for action in ("status", "verify", "apply", "status", "verify", "apply")]
    assert [done.returncode for done in states] == [0, patching.STATE_ERROR, 0, 0, 0, 0]
    for done, word in zip(states, ("pristine", "", "applied", "applied", "applied", "nothing to do"), strict=True):
        assert word in done.stdout
    assert all("Traceback" not in done.stderr for done in states)


def test_record_describes_what_lies_there(applied_site: Path, released_site: Path) -> None:
    """pip and uv check a package by RECORD: every row must be true after apply, and only ours may differ."""
    rows = {row[0]: row for row in csv.reader((applied_site / INFO / "RECORD").read_text().splitlines())}
    for path, recorded, size in rows.values():
        if recorded:
            content = (applied_site / path).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (recorded, int(size)) == (f"sha256={digest}", len(content)), path
    before = {row[0]: row for row in csv.reader((released_site / INFO / "RECORD").read_text().splitlines())}
    changed = {path for path in rows if rows[path] != before.get(path)}
    assert changed == {*RELEASED, f"{INFO}/{patching.STATE_NAME}"}
    assert set(before) <= set(rows)


def test_the_applied_code_is_python_and_changes_nothing_else(applied_site: Path, released_site: Path) -> None:
    after, before = contents(applied_site), contents(released_site)
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {*RELEASED, f"{INFO}/RECORD", f"{INFO}/{patching.STATE_NAME}"}
    for path in RELEASED:
        compile(after[path], path, "exec")


def test_a_cache_that_shares_the_files_keeps_the_released_ones(site: Path, tmp_path: Path, released_site: Path) -> None:
    """uv links installed files from its cache: writing through a link would poison every later environment."""
    cache = tmp_path / "cache"
    shutil.copytree(site, cache, copy_function=os.link)
    assert run(site, "apply", PACKAGE).returncode == 0
    assert contents(cache) == contents(released_site)
    assert contents(site) != contents(cache)


def test_file_modes_stay_and_compiled_files_go(site: Path) -> None:
    target = site / GENERATOR
    target.chmod(0o640)
    compiled = target.parent / "__pycache__/vllm_hidden_states_generator.cpython-311.pyc"
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_bytes(b"old")
    assert run(site, "apply", PACKAGE).returncode == 0
    assert target.stat().st_mode & 0o777 == 0o640
    assert not compiled.exists()


@pytest.mark.parametrize("path", [GENERATOR, "speculators/train/trainer.py", f"{INFO}/METADATA"])
@pytest.mark.parametrize("applied", [False, True])
def test_an_edited_file_is_named_and_nothing_is_changed(
    released_site: Path, applied_site: Path, tmp_path: Path, path: str, applied: bool
) -> None:
    site = Path(shutil.copytree(applied_site if applied else released_site, tmp_path / "site"))
    with (site / path).open("a") as file:
        file.write("\n")
    before = contents(site)
    for action in ("status", "apply", "verify"):
        done = run(site, action, PACKAGE)
        assert done.returncode == patching.STATE_ERROR
        assert str(site / path) in done.stderr
        assert "reinstall speculators==0.3.0" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert contents(site) == before


def test_a_missing_file_is_named(site: Path) -> None:
    (site / GENERATOR).unlink()
    done = run(site, "apply", PACKAGE)
    assert done.returncode == patching.STATE_ERROR
    assert f"{GENERATOR} is missing" in done.stderr


def test_an_edit_that_covers_its_tracks_in_record_is_found(applied_site: Path, tmp_path: Path) -> None:
    """RECORD and file agree, but not with what apply made."""
    site = Path(shutil.copytree(applied_site, tmp_path / "site"))
    old = patching._record_hash(site / GENERATOR)
    with (site / GENERATOR).open("a") as file:
        file.write("\n")
    record = site / INFO / "RECORD"
    record.write_text(record.read_text().replace(str(old), str(patching._record_hash(site / GENERATOR))))
    done = run(site, "verify", PACKAGE)
    assert done.returncode == patching.STATE_ERROR
    assert "not what apply made" in done.stderr


def test_another_version_is_refused(site: Path) -> None:
    (site / INFO).rename(site / "speculators-0.4.0.dist-info")
    metadata = site / "speculators-0.4.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 0.3.0", "Version: 0.4.0"))
    done = run(site, "apply", PACKAGE)
    assert done.returncode == patching.PACKAGE_ERROR
    assert "0.4.0 is installed, the patches are for 0.3.0" in done.stderr


def test_a_package_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "pipeline/patching.py"), "apply", PACKAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == patching.PACKAGE_ERROR
    assert "is not installed" in done.stderr


def test_without_gnu_patch_the_fix_is_named(site: Path, released_site: Path, tmp_path: Path) -> None:
    done = run(site, "apply", PACKAGE, PATH=str(tmp_path))
    assert done.returncode == patching.PATCH_ERROR
    assert "GNU patch is not on PATH: install it" in done.stderr
    assert contents(site) == contents(released_site)


def test_a_folder_that_cannot_be_written_is_named(site: Path) -> None:
    """The stage's name is taken by a file, which stands for any error of the system."""
    (site / INFO / (patching.STAGE_NAME + ".tmp")).write_text("")
    done = run(site, "apply", PACKAGE)
    assert done.returncode == patching.WRITE_ERROR
    assert patching.STAGE_NAME in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- Malformed patch sets


def _own_tool(folder: Path) -> Path:
    """The tool with patches of our own to spoil: it looks for patches/ beside pipeline/."""
    (folder / "pipeline").mkdir()
    shutil.copyfile(ROOT / "pipeline/patching.py", folder / "pipeline/patching.py")
    shutil.copytree(ROOT / "patches", folder / "patches")
    return folder / "pipeline/patching.py"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Last-Update: ", "Last-Update: yesterday ", "Last-Update"),
        ("Description: ", "Beschreibung: ", "no DEP-3 field"),
        ("Origin: other\n", "", "no field Origin"),
        ("Applies-To: speculators 0.3.0", "Applies-To: speculators", "Applies-To"),
        ("Applies-To: speculators 0.3.0", "Applies-To: vllm 0.3.0", "Applies-To"),
        ("Applies-To: speculators 0.3.0", "Applies-To: speculators 0.3.0\nLines-Of: 0.3.1", "Lines-Of '0.3.1'"),
        ("Applied-Upstream: 0.5.0, which drops this generator\n", "", "no reason"),
        ("\n---\n", "\n", "no line ---"),
        ("--- a/speculators", "--- /dev/null\n+++ b/speculators", "files that exist"),
        ("+++ b/speculators/", "+++ b/../speculators/", "files that exist"),
    ],
)
def test_a_malformed_patch_is_refused(site: Path, tmp_path: Path, old: str, new: str, said: str) -> None:
    tool = _own_tool(tmp_path)
    patch = tmp_path / "patches/speculators/tokenizer-trust-remote-code.patch"
    assert old in patch.read_text()
    patch.write_text(patch.read_text().replace(old, new, 1))
    done = run(site, "status", PACKAGE, tool=tool)
    assert done.returncode == patching.SERIES_ERROR, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_series_and_folder_must_agree(site: Path, tmp_path: Path) -> None:
    tool = _own_tool(tmp_path)
    folder = tmp_path / "patches/speculators"
    series = (folder / "series").read_text()
    (folder / "series").write_text(series.replace("spawn-workers.patch\n", ""))
    done = run(site, "status", PACKAGE, tool=tool)
    assert done.returncode == patching.SERIES_ERROR
    assert "spawn-workers.patch is not in series" in done.stderr
    (folder / "series").write_text(series)
    (folder / "spawn-workers.patch").unlink()
    done = run(site, "status", PACKAGE, tool=tool)
    assert done.returncode == patching.SERIES_ERROR
    assert "does not exist but is in series" in done.stderr
    done = run(site, "status", "nothing", tool=tool)
    assert done.returncode == patching.SERIES_ERROR
    assert "series does not exist" in done.stderr


def test_another_patch_set_is_refused(applied_site: Path, tmp_path: Path) -> None:
    site = Path(shutil.copytree(applied_site, tmp_path / "site"))
    (tmp_path / "tool").mkdir()
    tool = _own_tool(tmp_path / "tool")
    patch = tmp_path / "tool/patches/speculators/spawn-workers.patch"
    patch.write_text(patch.read_text().replace("Start the workers", "Begin the workers", 1))
    done = run(site, "apply", PACKAGE, tool=tool)
    assert done.returncode == patching.STATE_ERROR
    assert "another patch set" in done.stderr
    assert "reinstall" in done.stderr


def test_the_digest_is_over_names_order_and_bytes(tmp_path: Path) -> None:
    assert patching.patch_set_digest(PACKAGE) == SERIES.digest
    state = tmp_path / "patches"
    shutil.copytree(ROOT / "patches", state)
    assert patching.load_patch_set(PACKAGE, state).digest == SERIES.digest
    series = state / "speculators/series"
    lines = series.read_text().splitlines(keepends=True)
    series.write_text("".join([lines[1], lines[0], *lines[2:]]))
    assert patching.load_patch_set(PACKAGE, state).digest != SERIES.digest


def test_the_tool_needs_the_standard_library_only() -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "pipeline/patching.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "exit codes:" in done.stdout


# ---- Kills, and others at work

KILLER = """
import os, sys
sys.path.insert(0, {root!r})
left = [{events}]
def audit(event, arguments):
    changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")
    changes = changes or (event == "open" and arguments[1] in ("w", "wb"))
    if changes and {info!r} in str(arguments[0]):
        if left[0] == 0:
            os._exit(9)
        left[0] -= 1
sys.addaudithook(audit)
from pipeline import patching
sys.exit(patching.main(["apply", "speculators"]))
"""


def _apply_and_die(site: Path, events: int) -> int:
    """Ends the process, as kill -9 does, at a change of the file system. 0 if there were not that many."""
    code = KILLER.format(root=str(ROOT), events=events, info=str(site))
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.integers(0, 24))
def test_a_killed_apply_is_finished_by_the_next(released_site: Path, applied_site: Path, events: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(shutil.copytree(released_site, Path(folder) / "site"))
        died = _apply_and_die(site, events) == 9
        verified = run(site, "verify", PACKAGE)
        assert verified.returncode in (0, patching.STATE_ERROR)
        assert verified.returncode or contents(site) == contents(applied_site)
        assert died or verified.returncode == 0
        assert run(site, "apply", PACKAGE).returncode == 0
        assert run(site, "verify", PACKAGE).returncode == 0
        assert contents(site) == contents(applied_site)


def test_the_kills_reach_the_middle_of_the_move(site: Path, applied_site: Path) -> None:
    """Proof that the test above sees a half-moved package: the first rename stages, the later ones move."""
    halfway = []
    for events in range(10, 25, 3):
        copy = Path(shutil.copytree(site, site.parent / f"site{events}"))
        if _apply_and_die(copy, events) == 9 and (copy / INFO / patching.STAGE_NAME).exists():
            halfway.append(run(copy, "status", PACKAGE))
    assert len(halfway) >= 2
    assert all(done.returncode == patching.STATE_ERROR and "run apply again" in done.stderr for done in halfway)


def test_a_stage_of_another_patch_set_is_refused(site: Path) -> None:
    stage = site / INFO / patching.STAGE_NAME / INFO
    stage.mkdir(parents=True)
    (stage / patching.STATE_NAME).write_text(json.dumps({"digest": "0" * 64}))
    done = run(site, "apply", PACKAGE)
    assert done.returncode == patching.STATE_ERROR
    assert "delete it and reinstall" in done.stderr


def test_one_of_many_applies_and_the_others_find_it_done(site: Path, applied_site: Path) -> None:
    command = [sys.executable, str(ROOT / "pipeline/patching.py"), "apply", PACKAGE]
    environment = os.environ | {"PYTHONPATH": str(site)}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert sum("nothing to do" in line for line in said) == 3
    assert contents(site) == contents(applied_site)
