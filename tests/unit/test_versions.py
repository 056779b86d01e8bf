"""The inventory of an environment, and an image that is no longer what was built."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from pipeline import engine, patching, versions
from pipeline.__main__ import main

ROOT = patching.PATCHES.parent
COUNT = len(patching.load_patch_set("speculators").patches)


@pytest.fixture
def image(tmp_path, monkeypatch):
    """An image's inventory as its build writes it. Call it with a function that alters what is recorded."""
    path = tmp_path / "versions.json"
    monkeypatch.setattr(versions, "INVENTORY", path)

    def record(alter=lambda value: None):
        value = versions.inventory()
        alter(value)
        path.write_text(json.dumps(value))

    record.path = path
    return record


@pytest.fixture(autouse=True)
def no_inventory(monkeypatch, tmp_path):
    """As outside of an image; inside one, these tests run with more packages than it was built with."""
    monkeypatch.setattr(versions, "INVENTORY", tmp_path / "none.json")


def test_it_names_what_is_installed(capsys):
    assert main(["versions", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["engine"] == engine.version()
    for name in ("torch", "speculators", "nvidia-ml-py", "pydantic-settings"):
        assert value["packages"][name] == metadata.version(name)
    for package, version in (("speculators", None), ("vllm", "0.16.0")):
        state = value["patch_sets"][package]
        series = (patching.PATCHES / package / "series").read_text().split("\n")
        assert state["patches"] == [line for line in series if line.endswith(".patch")]
        assert (state["state"], state["digest"]) == ("applied", patching.patch_set_digest(package, version))
    assert value["revision"] is None


def test_a_person_finds_engine_and_patches_in_the_first_lines(capsys, monkeypatch):
    monkeypatch.setenv("AERIE_REVISION", "abc1234")
    assert main(["versions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "\n".join(lines[:5])
    assert "abc1234" in lines[0]
    assert engine.version().split()[1] in head
    assert f"patches applied, {COUNT} patches, set {patching.patch_set_digest('speculators')[:12]}" in head
    vllm = next(line.split() for line in lines[:5] if line.split()[0] == engine.version().split()[0])
    assert vllm[2:6] == ["patches", "applied,", "6", "patches,"]
    assert any(line.split() == ["torch", metadata.version("torch")] for line in lines[20:])


def test_nothing_heavy_is_imported_and_a_reader_may_stop_early():
    code = (
        "import sys; from pathlib import Path; from pipeline import versions; from pipeline.__main__ import main; "
        "versions.INVENTORY = Path('none'); code = main(['versions']); "
        "sys.exit(code or bool({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("required", "line"),
    [
        (["torch=0.0.1"], f"versions: torch 0.0.1 is required, {metadata.version('torch')} is installed"),
        (["no-such-thing=1"], "versions: no-such-thing 1 is required, none is installed"),
        ([f"torch={metadata.version('torch').split('.')[0]}"], "is required"),
    ],
)
def test_a_version_that_is_required_and_not_there_is_one_line(capsys, required, line):
    assert main(["versions", "--require", *required]) == 1
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_requirements_that_are_met(capsys):
    wanted = [f"Nvidia.ML_py={metadata.version('nvidia-ml-py')}", f"speculators=={metadata.version('speculators')}"]
    assert main(["versions", "--require", wanted[0], "--require", wanted[1]]) == 0
    assert not capsys.readouterr().err


def test_a_requirement_without_a_version_is_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["versions", "--require", "torch"])
    assert stopped.value.code == 2


def test_an_image_as_built(image, capsys):
    image()
    assert main(["versions", "--json"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == json.dumps(versions.inventory(), indent=1, ensure_ascii=False)


def test_an_image_prints_what_was_recorded_and_names_every_difference(image, capsys):
    def alter(value):
        value["packages"]["torch"] = "2.9.0"
        value["packages"]["gone"] = "1.0"
        del value["packages"]["speculators"]
        value["patch_sets"]["speculators"]["digest"] = "0" * 64
        value["python"] = "3.11.0"

    image(alter)
    assert main(["versions"]) == 1
    said = capsys.readouterr()
    assert "torch          2.9.0" in said.out
    differences = [line.partition("differ: ")[2] for line in said.err.splitlines()]
    digest = patching.patch_set_digest("speculators")[:12]
    assert sorted(differences) == [
        "package gone 1.0 was removed",
        f"package speculators {metadata.version('speculators')} was added",
        f"package torch was 2.9.0, is {metadata.version('torch')}",
        f"patch set of speculators was applied, {COUNT} patches, set 000000000000, "
        f"is applied, {COUNT} patches, set {digest}",
        f"python was 3.11.0, is {sys.version.split()[0]}",
    ]


def test_debian_packages_are_compared(image, capsys, monkeypatch):
    monkeypatch.setattr(versions, "_debian_packages", lambda: {"patch": "2.7.6", "make": "4.3"})
    image()
    monkeypatch.setattr(versions, "_debian_packages", lambda: {"patch": "2.7.7", "make": "4.3"})
    assert main(["versions"]) == 1
    assert "Debian package patch was 2.7.6, is 2.7.7" in capsys.readouterr().err


def test_the_shell_makes_the_inventory_before_it_is_written(image, capsys):
    """`versions --json > versions.json` in an image's build: the file is there, and empty."""
    image.path.touch()
    assert main(["versions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"]


@pytest.mark.parametrize("content", ["{", "[]", '{"aerie": "0.1.0"}'])
def test_a_file_that_is_no_inventory_is_one_line(image, capsys, content):
    image.path.write_text(content)
    assert main(["versions"]) == 4
    error = capsys.readouterr().err
    assert f"{image.path} is not an inventory" in error
    assert error.count("\n") == 1


def test_a_package_without_its_patches_is_told_not_raised(capsys, monkeypatch):
    monkeypatch.setattr(patching, "is_applied", lambda installed, patch_set: False)
    assert main(["versions"]) == 0
    assert f"patches pristine, {COUNT} patches" in capsys.readouterr().out


def test_a_broken_package_is_told_not_raised(capsys, monkeypatch, tmp_path):
    def broken(installed, patch_set):
        raise patching.PatchingError(patching.STATE_ERROR, "generator.py differs from RECORD: reinstall")

    monkeypatch.setattr(patching, "is_applied", broken)
    assert main(["versions"]) == 0
    assert f"patches broken, {COUNT} patches" in capsys.readouterr().out
    (tmp_path / "speculators").mkdir()
    (tmp_path / "speculators" / "series").write_text("missing.patch\n")
    monkeypatch.setattr(patching, "PATCHES", tmp_path)
    assert main(["versions"]) == 0
    out = capsys.readouterr().out
    assert "broken, 0 patches, set unreadable: " in out
    assert "missing.patch does not exist" in out
