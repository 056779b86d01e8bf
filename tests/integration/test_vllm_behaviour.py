"""What each patch of vLLM changes, asked of the real vLLM with the patches and as released; who notices its lack."""

import json
import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from pipeline import engine
from pipeline.config import load
from pipeline.errors import InputError
from pipeline.evaluate.counts import Question
from pipeline.evaluate.vllm_decode import CANNOT_DRAFT
from pipeline.evaluate.vllm_engine import VllmEngine
from pipeline.target import Target
from tests.contract import released
from tests.training import write_config

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def as_released(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python whose vLLM is the released one: links to the installed files, but for those that patches change."""
    folder = tmp_path_factory.mktemp("released")
    files = released.make_vllm_site(folder / "files")
    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    site = folder / "site"
    hidden = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, site / "vllm", copy_function=os.symlink, ignore=hidden)
    for path in released.RELEASED_VLLM:
        (site / path).unlink()
        shutil.copyfile(files / path, site / path)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def probe(python: str) -> dict[str, Any]:
    command = [python, str(ROOT / "tests" / "vllm_probe.py")]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_the_patches_change() -> None:
    assert probe(sys.executable) == {
        "draft_reads_from": ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"],
        "accepted_targets": ["llama", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"],
        "distinct_graph_keys": 3,
        "media_token_of_the_draft": 77,
        "remote_code_refused": [False, False],
        "remote_code_allowed": [True, True],
    }


def test_the_release_needs_each_of_them(as_released: str) -> None:
    """Where this fails, the probe does not see what it looks for, or the patch is not needed."""
    assert probe(as_released) == {
        "draft_reads_from": [],
        "accepted_targets": ["llama"],
        "distinct_graph_keys": 1,
        "media_token_of_the_draft": "'types.SimpleNamespace' object has no attribute 'image_token_index'",
        "remote_code_refused": [True, True],
        "remote_code_allowed": [True, True],
    }


def test_decoding_stops_before_weights_are_loaded(
    as_released: str, tmp_path: Path, deepseek_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own class is asked in the environment that decodes, whatever its packages say of themselves."""
    model = tmp_path / "model"
    model.mkdir()
    shutil.copyfile(deepseek_folder / "config.json", model / "config.json")  # without weights nothing can be loaded
    monkeypatch.setattr(engine, "require_eagle3", lambda *_: None)
    config = load(write_config(tmp_path / "run.toml", model, evaluate={"python": as_released}))
    question = Question([[1, 2, 3]], [258], 4, 2, 0.0, 0)
    with pytest.raises(InputError) as error:
        VllmEngine(config, Target(config.target), tmp_path).answer(question)
    said = str(error.value)
    assert said.startswith("evaluate: vLLM 0.16.0 cannot serve an EAGLE-3 draft for DeepseekV3ForCausalLM: ")
    assert said.endswith("Set evaluate.python to an environment whose vLLM does, or evaluate.engine to reference")
    assert "\n" not in said


def test_the_exit_code_is_not_one_of_others() -> None:
    """Python ends with 1 and 2, a shell with 126 and more, a signal with a negative one."""
    assert 2 < CANNOT_DRAFT < 126
