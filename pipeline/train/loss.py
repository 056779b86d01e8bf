"""Training-time test (EAGLE-3, section 3.2): the draft is unrolled k steps and each step is compared with the target.

Step k at index p takes token p+1+k, *of the data* (teacher forcing), and must agree with the target's
distribution at p+1+k, which predicts token p+2+k. Softmax and loss are float32 whatever autocast says.

Shapes: R tokens of a row, M supervised ones, H hidden, V target and D draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from pipeline.target import Head
from pipeline.train.data import Row
from pipeline.train.draft import Draft


@dataclass
class StepSums:
    """Sums over the supervised indices of one row, one entry per TTT step (tensors of shape [K])."""

    loss: Tensor
    """Cross entropy in nats, with gradient."""
    count: Tensor
    """Supervised indices."""
    agreed: Tensor
    """Indices where the draft's first choice was the target's at this and all earlier steps."""


class TargetHead:
    """The target's distribution over the draft's words, from its last states: final norm (once), then lm_head."""

    def __init__(self, head: Head, kept_D: Tensor, device: torch.device):
        self.norm_H, self.eps = head.norm_H.to(device), head.rms_norm_eps
        self.lm_head_DH = head.lm_head_VH[kept_D].to(device)
        self.lm_head_VH = head.lm_head_VH.to(device)
        self.kept_D = kept_D.to(device)

    def normed(self, last_MH: Tensor) -> Tensor:
        """Final-normed states [M, H], float32."""
        return F.rms_norm(last_MH.float(), self.norm_H.shape, self.norm_H, self.eps)

    @torch.no_grad()
    def probabilities(self, last_MH: Tensor) -> Tensor:
        """softmax over the draft's words [M, D], float32."""
        return F.linear(self.normed(last_MH), self.lm_head_DH).float().softmax(-1)

    @torch.no_grad()
    def choices(self, last_MH: Tensor) -> Tensor:
        """The target's most likely id over its whole vocabulary [M], in pieces that bound memory."""
        pieces = [F.linear(self.normed(piece), self.lm_head_VH).argmax(-1) for piece in last_MH.split(512)]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long, device=last_MH.device)


def shifted(values_R: Tensor, by: int, fill: int | bool = 0) -> Tensor:
    """values[p + by] at p; `fill` past the end."""
    return F.pad(values_R[by:], (0, by), value=fill)


def supervised_at(row: Row, step: int) -> Tensor:
    """Indices p of step k whose target, at p+1+k, lies in the same sample and predicts one of its own words [R]."""
    ahead = step + 1
    return shifted(row.supervised_R, ahead, False) & (shifted(row.document_R, ahead, -2) == row.document_R)


def unroll(draft: Draft, target: TargetHead, row: Row, steps: int, noise: Tensor | None, *, exact: bool) -> StepSums:
    """Run `steps` TTT steps over a row and sum up loss and agreement.

    `exact` compares with the target's choice over its whole vocabulary (validation: it is what decides
    acceptance); otherwise with its choice among the draft's words, which training has at hand.
    `noise` [R, L, H] is added to the aux states, never to what the targets come from.
    """
    device = row.tokens_R.device
    needed_M = row.supervised_R.nonzero().squeeze(-1)
    slot_R = torch.zeros_like(row.tokens_R).index_copy(0, needed_M, torch.arange(len(needed_M), device=device))
    target_MD = target.probabilities(row.last_RH[needed_M])
    choice_M = target.choices(row.last_RH[needed_M]) if exact else target.kept_D[target_MD.argmax(-1)]

    aux_RLH = row.aux_RLH.float() if noise is None else row.aux_RLH.float() + noise
    chain = draft.begin(aux_RLH, row.positions_R, row.documents)
    alive_R = torch.ones_like(row.supervised_R)
    loss, count, agreed = [], [], []
    for step in range(steps):
        hidden_RH = draft.advance(chain, shifted(row.tokens_R, step + 1))
        at = supervised_at(row, step).nonzero().squeeze(-1)
        slots = slot_R[at + step + 1]
        logits_MD = draft.logits(hidden_RH[at])
        loss.append(-(target_MD[slots] * logits_MD.log_softmax(-1)).sum())
        hit = target.kept_D[logits_MD.detach().argmax(-1)] == choice_M[slots]
        alive_R = alive_R.clone().index_copy_(0, at, alive_R[at] & hit)
        count.append(torch.tensor(float(len(at)), device=device))
        agreed.append(alive_R[at].sum().float())
    return StepSums(torch.stack(loss), torch.stack(count), torch.stack(agreed))
