"""What a change rebuilds, and what keeps an image from being built."""

import re
import shutil
import uuid
from pathlib import Path

import pytest

from tests.checkout import Checkout

PATCH = Path("patches/speculators/scheduler-block-size.patch")
NEW = uuid.uuid4().hex
"""What no build before this one has in its cache."""


@pytest.fixture
def changed(checkout: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the copy, so that the image of the other tests stays the chosen one."""
    folder = tmp_path / "changed"
    shutil.copytree(checkout.folder, folder, ignore=shutil.ignore_patterns("runs", "models"))
    return Checkout(folder, checkout.environment)


def build(changed: Checkout, check: bool = True) -> tuple[int, str]:
    done = changed.run("make", "build", VLLM="cpu", BUILD_FLAGS="--progress=plain", check=check)
    return done.returncode, done.stdout


def is_cached(output: str, step: str) -> bool:
    number = re.search(rf"^#(\d+) \[.*{re.escape(step)}", output, re.MULTILINE)
    assert number, output[-3000:]
    return f"\n#{number[1]} CACHED" in output


def test_editing_a_patch_does_not_install_anew(changed):
    path = changed.folder / PATCH
    path.write_text(path.read_text().replace("Description: ", f"Description: {NEW} ", 1))
    _, output = build(changed)
    assert is_cached(output, "install.sh")
    assert not is_cached(output, "patching.py apply")


def test_editing_the_pipeline_does_not_even_patch_anew(changed):
    with (changed.folder / "pipeline" / "vocab.py").open("a") as file:
        file.write(f"# {NEW}\n")
    _, output = build(changed)
    assert is_cached(output, "install.sh")
    assert is_cached(output, "patching.py apply")
    assert not is_cached(output, "preflight.contract")


def test_a_patch_that_does_not_apply_exactly_stops_the_build(changed):
    path = changed.folder / PATCH
    path.write_text(path.read_text().replace("kv_cache_config=", "kv_cache_konfig=", 1))
    code, output = build(changed, check=False)
    assert code != 0
    assert "scheduler-block-size.patch: does not apply exactly" in output


def test_a_call_that_does_not_fit_this_vllm_stops_the_build(changed):
    with (changed.folder / "pipeline" / "vocab.py").open("a") as file:
        file.write("\n\ndef wrong():\n    from vllm import LLM\n\n    LLM(model='m', max_modle_len=1)\n")
    code, output = build(changed, check=False)
    assert code != 0
    assert "takes no argument 'max_modle_len'; is 'max_model_len' meant?" in output


def test_unknown_build_is_refused_before_any_work(changed):
    done = changed.run("make", "build", VLLM="cuda", check=False)
    assert done.returncode != 0
    assert "VLLM=cuda: there are nightly, release and cpu" in done.stdout
