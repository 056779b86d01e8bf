"""Fixtures that several test modules share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads cost more than they bring; before torch starts
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB; an engine in this process keeps them until its end

from tests import models
from tests.kimi.model import save_small_kimi


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--docker", action="store_true", help="run tests/docker: needs an engine, builds an image")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def deepseek_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_tiny_deepseek(tmp_path_factory.mktemp("models") / "deepseek")


@pytest.fixture(scope="session")
def kimi_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_kimi(tmp_path_factory.mktemp("models") / "kimi")
