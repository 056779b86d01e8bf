"""A small run whose engine is a stand-in that computes states from ids.

What the engine itself computes is tested on the real one, in tests/integration.
"""

import json
from pathlib import Path

import pytest

from pipeline.extract import engines
from tests.extraction import HIDDEN, LENGTHS, NUM_LAYERS, SHARD_TOKENS, StandIn, extract
from tests.runs import contents, make_samples, write_run


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of which only the configuration and a weight file's bytes are looked at."""
    folder = tmp_path_factory.mktemp("target")
    config = {"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    class Fresh(StandIn):
        pass

    versions = {"engine_version": "stand-in 1", "patches": "none"}
    monkeypatch.setattr(engines, "start", lambda *arguments: Fresh(*arguments))
    monkeypatch.setattr("pipeline.extract.step.engine_versions", lambda: versions)
    return Fresh


@pytest.fixture
def config(tmp_path: Path, target: Path) -> Path:
    return write_run(tmp_path, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)


@pytest.fixture
def hidden(config: Path) -> Path:
    return config.parent / "runs" / "test" / "hidden"


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = write_run(folder, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)
    assert extract(config) == 0
    return contents(folder / "runs" / "test" / "hidden")
