"""What a change rebuilds, and what keeps an image from being built."""

import re
import shutil
import uuid
from pathlib import Path

import pytest

from tests.checkout import VERSION, Checkout, build_options, version_of_ones_own

PATCH = Path("patches/speculators/scheduler-block-size.patch")
NEW = uuid.uuid4().hex
"""What no build before this one has in its cache."""


@pytest.fixture
def changed(checkout: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the copy, so that the image of the other tests stays the chosen one."""
    folder = tmp_path / "changed"
    shutil.copytree(checkout.folder, folder, ignore=shutil.ignore_patterns("runs", "models"))
    version_of_ones_own(folder, f"{VERSION}.1")
    return Checkout(folder, checkout.environment)


def build(changed: Checkout, check: bool = True) -> tuple[int, str]:
    done = changed.run("make", "build", *build_options(), "BUILD_FLAGS=--progress=plain", check=check)
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
    done = changed.run("make", "build", "VLLM=cuda", check=False)
    assert done.returncode != 0
    assert "VLLM=cuda: there are nightly, release and cpu" in done.stdout


def test_the_test_stage_passes_its_tests(changed, engine):
    """In the image, as its user, on the packages that it has."""
    built = re.search(r"built (\S+)", changed.run("make", "build", *build_options(), "STAGE=test").stdout)
    assert built
    tests = ["-q", "tests/contract", "tests/unit/test_versions.py"]
    container = engine.containers.run(built[1], tests, detach=True)
    status, told = container.wait()["StatusCode"], container.logs().decode()
    container.remove()
    assert status == 0, told[-3000:]
    assert " passed" in told


def test_an_environment_does_not_steer_the_build(changed):
    """A TAG or STAGE that means something else; only the command line counts."""
    done = changed.run("make", "-n", "build", STAGE="prod", VLLM="cuda", TAG="x")
    assert done.stdout.strip() == "docker/image.sh build"
    printed = changed.run("make", "-pn", "build", STAGE="prod", TAG="x").stdout.splitlines()
    assert {"STAGE :=", "TAG :="} <= {line.strip() for line in printed}
