"""Training on several machines: what must be the same on all, and what is said when one of them is gone.

torchrun starts the processes there. Rank 0 prints and writes; it is on the machine whose name sorts first. All read
hidden/ and vocab/, and checkpoints/ when they go on, so runs/ must be one shared folder.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipeline.errors import ConfigError, InputError, LostError, UserError

TIMEOUT = timedelta(minutes=10)
"""The longest wait for another process, in a step or when they meet. One that ends closes its connections and is missed
at once: this is for a machine without power or network. NCCL's default; gloo's own is 30 minutes."""
SIGNS = ("gloo/", "ncclRemoteError")
"""In messages of errors that mean a lost connection, where they have no class: gloo names its source file."""

NO_CARD = "Unable to find address for"
"""Gloo's words."""


def refuse_unequal(world: int, inputs: dict[str, Any], checkpoint: str | None) -> None:
    """All processes compare settings, data and newest checkpoint: with others, one would train another draft.

    Raises the same InputError in all of them, naming the machines and the first thing that differs.
    """
    if world == 1:
        return
    seen: list[Any] = [None] * world
    dist.all_gather_object(seen, (socket.gethostname(), inputs, checkpoint))
    (here, settings, step), *others = seen
    for there, other_settings, other_step in others:
        for key in settings | other_settings:
            if (one := settings.get(key)) != (other := other_settings.get(key)):
                raise InputError(
                    f"train: {key} is {one} on {here} and {other} on {there}. "
                    "Give all machines one configuration and one shared folder of runs"
                )
        if step != other_step:
            raise InputError(
                f"train: the newest checkpoint is {step or 'none'} on {here} and {other_step or 'none'} on {there}. "
                "All machines must see one shared folder of runs; nothing was changed"
            )


def told(error: Exception, rank: int, world: int) -> UserError | None:
    """What to say where `error` is one of the connection to the other processes; None where it is another one."""
    text = str(error)
    if NO_CARD in text:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        return ConfigError(
            f"train: GLOO_SOCKET_IFNAME is {name}: {socket.gethostname()} has no such card with an address"
        )
    if not isinstance(error, dist.DistNetworkError | dist.DistStoreError) and not any(sign in text for sign in SIGNS):
        return None
    line = text.partition("\n")[0]
    why = line.partition("] ")[2] if line.startswith("[") else line  # gloo begins with the place in its source
    return LostError(
        f"train: process {rank + 1} of {world} on {socket.gethostname()} has lost the others ({why}). One of them, its "
        "machine or the network has ended: look at their output. Run it again on all: it goes on"
    )
