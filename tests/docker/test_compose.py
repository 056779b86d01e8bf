"""compose.yaml as Compose understands it; nothing is started."""

import json

import pytest

from tests.checkout import TOKEN, Checkout

GPU_SERVICES = {"preflight", "prepare", "extract", "training", "train", "evaluate", "serve", "shell"}
SERVICES = GPU_SERVICES | {"vocab", "board"}


def services(checkout: Checkout, **environment: str) -> dict[str, dict]:
    told = checkout.compose("--profile", "*", "config", "--format", "json", **environment)
    return json.loads(told.stdout)["services"]


@pytest.fixture(scope="module")
def on_gpus(checkout) -> dict[str, dict]:
    return services(checkout, COMPOSE_FILE="compose.yaml")


def test_all_services_are_there(on_gpus):
    assert set(on_gpus) == SERVICES


def test_gpu_services_share_their_nccl_settings(on_gpus, checkout):
    lines = (checkout.folder / "docker" / "nccl.env").read_text().splitlines()
    wanted = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert "NCCL_P2P_LEVEL" in wanted
    for name in GPU_SERVICES:
        found = {key: value for key, value in on_gpus[name]["environment"].items() if key.startswith("NCCL_")}
        assert found == wanted, name


def test_gpu_services_get_eight_gpus_and_what_nccl_needs(on_gpus, checkout):
    fewer = services(checkout, COMPOSE_FILE="compose.yaml", GPU_COUNT="2")
    for name in SERVICES:
        gpus, limits, memory = (on_gpus[name].get(key) for key in ("deploy", "ulimits", "shm_size"))
        if name not in GPU_SERVICES:
            assert gpus is limits is memory is None
            continue
        devices = {"driver": "nvidia", "count": 8, "capabilities": ["gpu"]}
        assert gpus["resources"]["reservations"]["devices"] == [devices]
        assert fewer[name]["deploy"]["resources"]["reservations"]["devices"] == [devices | {"count": 2}]
        assert limits == {"memlock": -1, "stack": 67108864, "nofile": 1048576}
        assert memory == str(32 << 30)


def test_on_a_cpu_nothing_asks_for_gpus(checkout):
    for name, service in services(checkout, COMPOSE_FILE="compose.yaml:compose.cpu.yaml").items():
        assert not service.get("deploy"), name
        assert not service.get("ulimits"), name


def test_only_prepare_sees_the_token_and_goes_online(on_gpus):
    for name, service in on_gpus.items():
        assert ("secrets" in service) == (name == "prepare")
        assert (service["environment"]["HF_HUB_OFFLINE"] == "0") == (name == "prepare")
        assert TOKEN not in json.dumps(service)
    assert {name for name, service in on_gpus.items() if "offline" not in service["networks"]} == {
        "prepare",
        "serve",
        "board",
    }


def test_services_are_locked_down(on_gpus):
    for name, service in on_gpus.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service["user"].startswith("0"), name
        writable = {volume["target"] for volume in service["volumes"] if not volume.get("read_only")}
        assert writable == {"/app/runs", "/cache"} | ({"/app/models"} if name == "prepare" else set())


def test_without_an_image_it_says_what_to_do(checkout):
    done = checkout.compose("config", check=False, AERIE_IMAGE="")
    assert done.returncode != 0
    assert "make build" in done.stdout
