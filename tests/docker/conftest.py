"""An image built from this checkout, and a copy of the checkout to run it in.

Nothing of the user's is touched: the copy has a folder, a compose project and volumes of its own, and all of that and
the images are removed at the end. The engine's build cache stays: it is the engine's own to clean.
"""

import os
from collections.abc import Iterator

import pytest

import docker
from tests import models
from tests.checkout import CONFIG, TOKEN, USER_ID, Checkout, conversation, copy_checkout


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
    project = folder / "pyproject.toml"  # a version, and so a tag, that no image of the user's has
    project.write_text(project.read_text().replace('version = "', f'version = "0.0.dev{os.getpid()}.', 1))
    models.save_tiny_llama(folder / "models" / "tiny")
    for name, conversations in (("few", 24), ("many", 400)):
        (folder / "data" / f"{name}.jsonl").write_text("".join(map(conversation, range(conversations))))
        (folder / "configs" / f"{name}.toml").write_text(CONFIG.format(name=name, data=name))
    for path in (folder / "runs", folder / "models", *(folder / "models").rglob("*")):
        os.chown(path, USER_ID, USER_ID)
    for path in tmp_path_factory.getbasetemp().parent, tmp_path_factory.getbasetemp(), folder.parent:
        path.chmod(0o755)  # bind mounts are reached by path
    before = {image.id for image in engine.images.list()}
    checkout = Checkout(
        folder,
        {
            "UID": str(USER_ID),
            "GID": str(USER_ID),
            "AERIE_CONFIG": "configs/few.toml",
            "AERIE_CACHE": f"aerie-test-{os.getpid()}",
            "HF_TOKEN": TOKEN,
        },
    )
    checkout.run("make", "build", VLLM="cpu")
    yield checkout
    checkout.compose("down", "--volumes", "--remove-orphans")
    for image in engine.images.list():
        if image.id not in before:
            engine.images.remove(image.id, force=True)


@pytest.fixture(scope="session")
def image(checkout: Checkout) -> str:
    """The image that the services run."""
    return checkout.remembered("AERIE_IMAGE")
