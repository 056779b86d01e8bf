"""A vLLM that cannot hand the target's states to a draft is refused at once, and not after the target is loaded."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import engine
from pipeline.__main__ import main
from pipeline.config import TargetSection, load
from pipeline.errors import ConfigError, InputError
from pipeline.evaluate.vllm_engine import VllmEngine
from pipeline.preflight import step
from pipeline.preflight.finding import Facts, State
from pipeline.target import FAMILIES, Target
from tests.contract import released
from tests.contract.released import as_version
from tests.training import write_config

NEEDS_PATCHES = sorted(name for name, family in FAMILIES.items() if family.eagle3_since > (0, 16))


def save_config(folder: Path, model_type: str) -> Path:
    """A target of which only config.json is there."""
    text = {"model_type": model_type, "hidden_size": 64, "vocab_size": 300, "num_hidden_layers": 8}
    whole = {"model_type": model_type, "text_config": text} if FAMILIES[model_type].text_config else text
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Callable[[Path], str]:
    """The Python of an environment that holds what lies in a folder, and nothing else."""

    def make(site: Path) -> str:
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n')
        script.chmod(0o755)
        return str(script)

    return make


def gap(tmp_path: Path, model_type: str, python: str) -> str | None:
    target = Target(TargetSection(path=str(save_config(tmp_path / "model", model_type)), dtype="float32"))
    return engine.eagle3_gap(target, python)


def test_the_families_of_the_mission_need_them() -> None:
    assert {"kimi_k25", "deepseek_v3"} <= set(NEEDS_PATCHES)
    assert not {"llama", "qwen3"} & set(NEEDS_PATCHES)


@pytest.mark.parametrize("model_type", NEEDS_PATCHES)
def test_what_is_missing_is_named(tmp_path: Path, vllm_site: Path, python, model_type: str) -> None:
    here = python(as_version(vllm_site, "0.16.0"))
    said = gap(tmp_path, model_type, here)
    assert said is not None
    assert said.startswith(f"vllm 0.16.0 cannot serve an EAGLE-3 draft for {model_type} without patches/vllm (")
    assert f"run {here} pipeline/patching.py apply vllm" in said
    assert "vLLM 0.18 or later" in said
    assert len(said.splitlines()) == 1
    assert released.run(vllm_site, "apply", "vllm").returncode == 0
    assert gap(tmp_path, model_type, here) is None


@pytest.mark.parametrize(
    ("version", "missing"), [("0.17.1", True), ("0.18.0", False), ("0.32.0", False), ("1.0rc1", False)]
)
def test_later_releases_know_it_themselves(
    tmp_path: Path, vllm_site: Path, python, version: str, missing: bool
) -> None:
    said = gap(tmp_path, "kimi_k25", python(as_version(vllm_site, version)))
    assert (said is not None) == missing
    assert said is None or "the patches are for 0.16.0 or" in said


def test_a_llama_needs_no_patch(tmp_path: Path, vllm_site: Path, python) -> None:
    assert gap(tmp_path, "llama", python(vllm_site)) is None


def test_an_environment_without_vllm_and_one_that_is_none(tmp_path: Path, python) -> None:
    with pytest.raises(InputError, match="has no vLLM"):
        gap(tmp_path, "kimi_k25", python(tmp_path))
    with pytest.raises(ConfigError, match="cannot be run"):
        gap(tmp_path, "kimi_k25", "/nowhere/python")


# ---- Who asks


@pytest.fixture
def unpatched(tmp_path: Path, vllm_site: Path, python, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's file. Its target is Kimi-like; this environment has a GPU's vLLM 0.16.0, as released."""
    monkeypatch.setattr(sys, "executable", python(as_version(vllm_site, "0.16.0")))
    monkeypatch.setattr(engine, "version", lambda: "vllm 0.16.0")
    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("vLLM was started"))
    return write_config(tmp_path / "run.toml", save_config(tmp_path / "model", "kimi_k25"))


def test_serve_refuses(unpatched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(unpatched)]) == 4
    said = capsys.readouterr().err
    assert said.startswith("serve: vllm 0.16.0 cannot serve an EAGLE-3 draft for kimi_k25 without patches/vllm (")
    assert said.endswith("pipeline/patching.py apply vllm, or use the image\n")
    assert said.count("\n") == 1


def test_evaluate_refuses(unpatched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.evaluate.vllm_engine._has_gpu", lambda: True)
    for overrides in ({}, {"evaluate": {"python": sys.executable}}):
        config = load(unpatched, overrides)
        with pytest.raises(InputError, match=r"^evaluate: vllm 0.16.0 cannot serve an EAGLE-3 draft for kimi_k25"):
            VllmEngine(config, Target(config.target), unpatched.parent)


def test_preflight_fails(unpatched: Path) -> None:
    finding = step.draft_engine(Facts(load(unpatched, {})))
    assert finding.state is State.FAIL
    assert finding.text.startswith("vllm 0.16.0 cannot serve an EAGLE-3 draft for kimi_k25 without patches/vllm")
    finding = step.draft_engine(Facts(load(unpatched, {"target": {"path": str(unpatched.parent / "none")}})))
    assert finding.state is State.NOT_APPLICABLE


def test_preflight_asks_this_environment_too_where_another_one_evaluates(
    unpatched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve` runs here, whatever evaluate.python says."""
    gap, elsewhere = engine.eagle3_gap, "/elsewhere/python"
    monkeypatch.setattr(engine, "eagle3_gap", lambda target, python: None if python == elsewhere else gap(target))
    finding = step.draft_engine(Facts(load(unpatched, {"evaluate": {"python": elsewhere}})))
    assert finding.state is State.FAIL


def test_preflight_passes_with_the_patches(unpatched: Path, vllm_site: Path) -> None:
    assert released.run(vllm_site, "apply", "vllm").returncode == 0
    finding = step.draft_engine(Facts(load(unpatched, {})))
    assert (finding.state, finding.text) == (State.OK, "vllm 0.16.0 can serve an EAGLE-3 draft for kimi_k25")
