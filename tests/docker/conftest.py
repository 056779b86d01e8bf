"""An image built from this checkout, and a copy of the checkout to run it in.

Nothing of the user's is touched: the copy has a folder, a compose project and volumes of its own, and all of that and
the images are removed at the end. The engine's build cache stays: it is the engine's own to clean.
"""

import os
from collections.abc import Iterator

import docker
import pytest

from tests import models
from tests.checkout import (
    CONFIG,
    GROUP_ID,
    TOKEN,
    USER_ID,
    VERSION,
    Checkout,
    build_options,
    conversation,
    copy_checkout,
    version_of_ones_own,
)


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> docker.DockerClient:
    if not request.config.getoption("--docker"):
        pytest.skip("needs a Docker engine and builds an image: make test-docker runs it")
    if reason := os.environ.get("AERIE_NO_DOCKER"):
        pytest.skip(reason)
    return docker.from_env()


@pytest.fixture(scope="session")
def checkout(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """The copy, with the CPU image built by `make build` and a tiny model to run it on."""
    folder = copy_checkout(tmp_path_factory.mktemp("docker") / "checkout")
    version_of_ones_own(folder, f"{VERSION}.0")
    models.save_tiny_llama(folder / "models" / "tiny")
    (folder / "runs" / "few").mkdir()
    (folder / ".env").write_text("# what the user has put here\n")
    for name, conversations in (("few", 24), ("many", 1200)):
        (folder / "data" / f"{name}.jsonl").write_text("".join(map(conversation, range(conversations))))
        (folder / "configs" / f"{name}.toml").write_text(CONFIG.format(name=name, data=name))
    for path in (*(folder / "runs").rglob("*"), folder / "runs", folder / "models", *(folder / "models").rglob("*")):
        os.chown(path, USER_ID, GROUP_ID)
    for path in tmp_path_factory.getbasetemp().parent, tmp_path_factory.getbasetemp(), folder.parent:
        path.chmod(path.stat().st_mode | 0o055)  # bind mounts are reached by path
    checkout = Checkout(
        folder,
        {
            "UID": str(USER_ID),
            "GID": str(GROUP_ID),
            "AERIE_CONFIG": "configs/few.toml",
            "AERIE_CACHE": f"aerie-test-{os.getpid()}",
            "HF_TOKEN": TOKEN,
        },
    )
    try:
        checkout.run("make", "build", *build_options())
        yield checkout
    finally:
        checkout.compose("down", "--volumes", "--remove-orphans", check=False)
        remove_images(engine)
        engine.volumes.get(checkout.environment["AERIE_CACHE"]).remove()


def remove_images(engine: docker.DockerClient) -> None:
    """Those of this session, known by their version."""
    for image in engine.images.list():
        if image.labels.get("org.opencontainers.image.version", "").startswith(f"{VERSION}."):
            engine.images.remove(image.id, force=True)


@pytest.fixture(scope="session")
def image(checkout: Checkout) -> str:
    """The image that the services run."""
    return checkout.remembered("AERIE_IMAGE")
