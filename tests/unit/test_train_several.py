"""What processes on several machines compare before they begin, and what they say when they lose each other."""

import socket

import pytest
import torch.distributed as dist

from pipeline.errors import ConfigError, InputError, LostError
from pipeline.train import machines

SETTINGS = {"epochs": 4, "hidden": "aa"}
SAME = ("two", SETTINGS, "step-00000004")


def compared_with(monkeypatch: pytest.MonkeyPatch, other: tuple) -> None:
    """What process 1 says, which has SETTINGS and step 4, when `other` is what process 2 has."""

    def gather(seen: list, own: tuple) -> None:
        seen[:] = [own, SAME, other]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(socket, "gethostname", lambda: "one")
    machines.refuse_unequal(3, SETTINGS, "step-00000004")


def test_equal_ones_may_begin(monkeypatch):
    compared_with(monkeypatch, SAME)
    machines.refuse_unequal(1, SETTINGS, None)  # one process has nobody to ask


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (("three", SETTINGS | {"epochs": 5}, "step-00000004"), "train: epochs is 4 on one and 5 on three. Give all"),
        (("three", SETTINGS | {"init_from": "x"}, "step-00000004"), "train: init_from is None on one and x on three"),
        (("three", {"epochs": 4, "hidden": "bb"}, None), "hidden is aa on one and bb on three"),
        (("three", SETTINGS, None), "newest checkpoint is step-00000004 on one and none on three"),
        (("three", SETTINGS, "step-00000002"), "newest checkpoint is step-00000004 on one and step-00000002 on three"),
    ],
)  # fmt: skip
def test_what_differs_is_named_with_its_machines(monkeypatch, other, line):
    with pytest.raises(InputError, match=line):
        compared_with(monkeypatch, other)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [192.0.2.2]:35"),
         "(Connection closed by peer [192.0.2.2]:35)"),
        (dist.DistBackendError("NCCL error in: a.cpp:1, remote process exited\nncclRemoteError: A call failed"),
         "(NCCL error in: a.cpp:1, remote process exited)"),
        (dist.DistNetworkError("The client socket has timed out"), "(The client socket has timed out)"),
        (dist.DistStoreError("wait timeout after 600000ms"), "(wait timeout after 600000ms)"),
    ],
)  # fmt: skip
def test_a_lost_connection_is_told_in_a_line(error, why):
    line = machines.told(error, 1, 2)
    assert isinstance(line, LostError)
    assert line.exit_code == 1
    assert f"process 2 of 2 on {socket.gethostname()} has lost the others {why}" in str(line)
    assert "\n" not in str(line)


def test_a_card_that_is_not_there_is_a_setting(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    words = "[enforce fail at /x/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth7"
    line = machines.told(RuntimeError(words), 0, 2)
    assert isinstance(line, ConfigError)
    assert "GLOO_SOCKET_IFNAME is eth7" in str(line)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA out of memory"), dist.DistBackendError("NCCL error\nncclUnhandledCudaError: launch failed")],
)
def test_other_faults_keep_their_traceback(error):
    assert machines.told(error, 0, 2) is None
