"""What changes the draft's weights: AdamW alone, or Muon on the matrices inside the draft and AdamW on the rest.

Muon (torch.optim.Muon) keeps one moment of a weight, a mean of gradients, and steps by that matrix with its singular
values brought near to one, which five Newton-Schulz iterations do in bfloat16. Its steps are scaled to AdamW's usual
size ("match_rms_adamw"), so that both take one learning rate.
"""

import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.train.draft import Draft

ADAMW_KEEPS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a weight; nothing of one that it has not changed yet."""
MUON_KEEPS = ("momentum_buffer",)
"""What Muon keeps of one."""


class MuonAndAdamW(torch.optim.Optimizer):
    """The two as one: its groups and its state are theirs, the same objects: what is set in one is set in all."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.muon, self.adamw = muon, adamw
        muon.state = adamw.state = self.state
        self.matrices = {p for group in muon.param_groups for p in group["params"]}
        """Muon's weights."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] (as the base runs)
        """One step of both, by gradients that are there."""
        self.muon.step()
        self.adamw.step()


def make_optimizer(draft: Draft, section: TrainSection) -> torch.optim.Optimizer:
    """What train.optimizer names, over the weights that are trained. Muon's are the matrices but the output rows."""
    trained = [p for p in draft.parameters() if p.requires_grad]
    muons = {p for p in trained if p.dim() > 1 and p is not draft.lm_head.weight} if section.optimizer == "muon" else ()
    groups = [
        {"params": [p for p in trained if p.dim() > 1 and p not in muons], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, fused=True)
    if not muons:
        return adamw
    muon = torch.optim.Muon(
        [p for p in trained if p in muons],
        lr=section.learning_rate,
        weight_decay=section.muon_weight_decay,
        momentum=0.95,
        nesterov=True,
        ns_steps=5,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonAndAdamW(muon, adamw)


def keeps(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[str, ...]:
    """The names of what the optimiser keeps of a weight once it has changed it."""
    return MUON_KEEPS if isinstance(optimizer, MuonAndAdamW) and parameter in optimizer.matrices else ADAMW_KEEPS
