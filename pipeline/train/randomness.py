"""Every random number generator that a run could draw from: seeded at its start, saved with its checkpoints.

What Aerie draws in training (order of the rows, noise) is a function of seed, epoch and step, and needs none of them;
a library that draws, dropout say, must not make a resumed run another one. Each process has its own.
"""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

State = dict[str, Tensor]
"""A generator's state by its name: `python`, `numpy`, `torch`, `cuda`."""


def seed_all(seed: int, rank: int) -> None:
    """Seed Python's, NumPy's and torch's generators, in each process another way."""
    own = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)  # the GPUs' too


def random_state() -> State:
    """The generators of this process."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), int(position), int(has_gauss)], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(cached)], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        **({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}),
    }


def set_random_state(state: State) -> None:
    """Go on where `random_state` was. A GPU's state has no effect where there is none."""
    version, *words = state["python"].tolist()
    random.setstate((version, tuple(words), *(state["python_gauss"].tolist() or [None])))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def gathered(world: int) -> list[State]:
    """The states of all processes, by rank. All of them call it together."""
    if world == 1:
        return [random_state()]
    states: list[State] = [{} for _ in range(world)]
    dist.all_gather_object(states, random_state())
    return states
