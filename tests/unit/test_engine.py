"""What the steps share of vLLM, without starting it."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from pipeline import engine, patching, serve
from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.target import Target
from tests.kimi.model import pinned, write_config


def run_of(target: dict, **sections) -> Run:
    return Run.model_validate({"name": "x", "target": target, "prepare": {"sources": ["x"]}, **sections})


def test_another_vllm_does_not_get_what_was_set_for_this_one(monkeypatch):
    """0.32's CPU build does not start with VLLM_ENABLE_V1_MULTIPROCESSING=0; the user's own settings it gets."""
    monkeypatch.setattr(engine, "_set_here", {})
    monkeypatch.setattr(engine, "on_cpu", lambda: True)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "TIKTOKEN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(before))
        engine.quiet_environment()
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert os.environ["TIKTOKEN_CACHE_DIR"] == "", "or a server's tokenizer takes copies of other ranks"
        assert engine.given_environment() == before


def test_patches_are_part_of_what_a_run_key_calls_the_engine():
    digest = patching.patch_set_digest("vllm", "0.16.0")
    assert engine.identity() == f"{engine.version()}, patches {digest}"
    assert engine.identity(sys.executable) == engine.version()


def test_the_way_to_load_is_passed_on_and_weights_that_are_made_up_have_a_key_of_their_own(tmp_path):
    write_config(tmp_path, "float32")
    dummy = run_of(pinned(tmp_path) | {"load_format": "dummy"})
    assert engine.engine_arguments(dummy)["load_format"] == "dummy"
    assert Target(dummy.target).fingerprint.endswith("-dummy")
    with pytest.raises(InputError, match="has no weights"):
        _ = Target(run_of(pinned(tmp_path)).target).fingerprint


def test_every_other_engine_loads_that_way_too(tmp_path, monkeypatch):
    from pipeline.evaluate import vllm_engine
    from pipeline.evaluate.counts import Question

    write_config(tmp_path, "float32")
    dummy = run_of(pinned(tmp_path) | {"load_format": "dummy"})
    target, told = Target(dummy.target), {}
    options = serve.arguments(dummy, target, None)
    assert options[options.index("--load-format") + 1] == "dummy"

    def run(command, **_):
        told.update(json.loads(Path(command[2]).read_text())["engine"])
        Path(command[3]).write_text("{}")
        return SimpleNamespace(returncode=0)

    evaluating = object.__new__(vllm_engine.VllmEngine)
    evaluating.config, evaluating.target, evaluating.python = dummy, target, sys.executable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine.subprocess, "run", run)
        evaluating._decode(Question([[1, 2]], [0], 3, 10, 0.0, 0), {})
    assert told["load_format"] == "dummy"

    pytest.importorskip("vllm")
    from pipeline.extract.environment import speculators_silenced
    from pipeline.extract.speculators_engine import SpeculatorsEngine

    with speculators_silenced():
        from speculators.data_generation import vllm_hidden_states_generator as generator
    monkeypatch.setattr(
        generator, "VllmHiddenStatesGenerator", lambda *_, **arguments: told.update(arguments) or MagicMock()
    )
    told.clear()
    SpeculatorsEngine(dummy, target, [1, 2])
    assert told["load_format"] == "dummy"


def test_kimi_is_asked_for_text_alone_and_with_its_tokenizer(tmp_path):
    """Its image processor wants a tokenizer even then: vLLM 0.16 does not start with skip_tokenizer_init."""
    write_config(tmp_path, "float32")
    arguments = engine.engine_arguments(run_of(pinned(tmp_path)))
    assert arguments["limit_mm_per_prompt"] == {"vision_chunk": 0}
    assert arguments["skip_tokenizer_init"] is False
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    arguments = engine.engine_arguments(run_of(pinned(tmp_path)))
    assert "limit_mm_per_prompt" not in arguments
    assert arguments["skip_tokenizer_init"] is True


@pytest.mark.parametrize(
    ("on_cpu", "wanted", "eager"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_answers_are_compiled_on_gpus_unless_told_otherwise(monkeypatch, tmp_path, on_cpu, wanted, eager):
    monkeypatch.setattr(engine, "on_cpu", lambda: on_cpu)
    write_config(tmp_path, "float32")
    prepare = {"sources": ["x"], "enforce_eager": wanted}
    assert engine.engine_arguments(run_of(pinned(tmp_path), prepare=prepare))["enforce_eager"] is eager
