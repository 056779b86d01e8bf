"""make push and make pull, with a real registry on the loopback. The image is a small one: what counts is the way."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.checkout import VERSION, Checkout, copy_checkout

TAG = f"{VERSION}.2-vllm-cpu0.16.0-0123456789ab"
REGISTRY_CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: 127.0.0.1:{port}}}
"""


@pytest.fixture(scope="module")
def registry(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port/team of a registry that runs as a process of ours."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed (Debian's package of that name)")
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "config.yml").write_text(REGISTRY_CONFIG.format(folder=folder / "data", port=port))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log)
    try:
        for _ in range(100):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}/team"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def built(engine: docker.DockerClient, tmp_path: Path) -> Iterator[Checkout]:
    """A checkout in which a small image counts as the one that was built."""
    checkout = Checkout(copy_checkout(tmp_path / "checkout"), {"AERIE_CACHE": f"aerie-test-push-{os.getpid()}"})
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text('FROM scratch\nCOPY hello /\nLABEL aerie.vllm="cpu"\n')
    (tmp_path / "context" / "hello").write_text(str(tmp_path))
    tag = f"aerie:{TAG}"
    subprocess.run(["docker", "build", "-q", "-t", tag, tmp_path / "context"], check=True, stdout=subprocess.DEVNULL)
    (checkout.folder / ".env").write_text(f"AERIE_RUNS=./elsewhere\nAERIE_IMAGE={tag}\n")
    image = engine.images.get(tag).id
    yield checkout
    engine.images.remove(image, force=True)
    for volume in engine.volumes.list(filters={"name": checkout.environment["AERIE_CACHE"]}):
        volume.remove()


def test_a_teammate_runs_the_same_bits(engine, registry, built, tmp_path):
    told = built.run("make", "push", f"REGISTRY={registry}").stdout
    digest = re.search(r"sha256:[0-9a-f]{64}", built.remembered("AERIE_IMAGE", "image.env"))
    assert digest
    reference = f"{registry}/aerie@{digest[0]}"
    assert reference in told
    assert f"{registry}/aerie:{TAG}" in told
    assert built.remembered("AERIE_IMAGE") == reference
    assert built.remembered("AERIE_RUNS") == "./elsewhere", "what the user has put into .env stays"

    original = engine.images.get(reference).id
    for tag in engine.images.get(reference).tags:
        engine.images.remove(tag)
    assert reference not in str([image.attrs["RepoDigests"] for image in engine.images.list()])
    teammate = Checkout(copy_checkout(tmp_path / "teammate"), built.environment)
    shutil.copy(built.folder / "image.env", teammate.folder)
    teammate.run("make", "pull")
    assert engine.images.get(reference).id == original
    services = json.loads(teammate.compose("--profile", "*", "config", "--format", "json").stdout)["services"]
    assert {service["image"] for service in services.values()} == {reference}
    assert not services["extract"].get("deploy"), "an image without GPUs runs without asking for them"


def test_a_tag_of_ones_own(registry, built):
    assert f"{registry}/aerie:rc1" in built.run("make", "push", f"REGISTRY={registry}", "TAG=rc1").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["REGISTRY=127.0.0.1:1/team", "TAG=latest"], "latest says nothing"),
        ([], "say where to: make push REGISTRY="),
        (["REGISTRY=127.0.0.1:1/team"], "connection refused"),
    ],
)
def test_push_that_cannot_be(built, arguments, said):
    done = built.run("make", "push", *arguments, check=False)
    assert done.returncode != 0
    assert said in done.stdout
    assert not (built.folder / "image.env").exists()


def test_pull_needs_a_digest(built):
    done = built.run("make", "pull", check=False)
    assert done.returncode != 0
    assert "image.env names no image" in done.stdout
    (built.folder / "image.env").write_text("AERIE_IMAGE=registry.example/team/aerie:0.1.0\n")
    done = built.run("make", "pull", check=False)
    assert done.returncode != 0
    assert "no reference by digest" in done.stdout


def test_push_before_build(built):
    (built.folder / ".env").unlink()
    done = built.run("make", "push", "REGISTRY=127.0.0.1:1/team", check=False)
    assert done.returncode != 0
    assert "Run make build first" in done.stdout
