"""Training-time test (EAGLE-3, section 3.2): the draft is unrolled k steps and each step is compared with the target.

Step k at index p takes token p+1+k, *of the data* (teacher forcing), and must agree with the target's
distribution at p+1+k, which predicts token p+2+k. Softmax and loss are float32 whatever autocast says.

Shapes: R tokens of a row, K steps, M indices whose states the loss needs, J supervised tokens, C of them in a chunk,
H hidden, V target and D draft vocabulary.

What is not needed is not computed: a supervised token j is the target of index j-1-k in step k, so only indices right
before supervised tokens ask anything of the draft, all others give step 0's keys. Logits exist for one chunk of
supervised tokens at a time: the target's, once, and those of all K steps against it, with their gradients at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from pipeline.target import Head
from pipeline.train.attention import BLOCK, Sight, block_mask, starts_of
from pipeline.train.data import Row
from pipeline.train.draft import Draft

CHUNK_ROWS = 3072
"""Rows of logits (supervised tokens times steps) of one chunk: enough to fill a GPU's matrix units, and 600 MB of
logits, gradients and target at 32,000 words."""


@dataclass
class StepSums:
    """Sums over the supervised indices of one row, one entry per TTT step (tensors of shape [K])."""

    loss: Tensor
    """Cross entropy in nats, without gradient."""
    count: Tensor
    """Supervised indices."""
    agreed: Tensor
    """Indices where the draft's first choice was the target's at this and all earlier steps."""
    total: Tensor
    """The sum over steps of `scale` times loss, a scalar with gradient."""


class TargetHead:
    """The target's distribution over the draft's words, from its last states: final norm (once), then lm_head.

    `dtype` is what its rows are kept and multiplied in: the target's own where training runs in it. Default: float32.
    """

    def __init__(self, head: Head, kept_D: Tensor, device: torch.device, dtype: torch.dtype = torch.float32):
        self.norm_H, self.eps = head.norm_H.to(device), head.rms_norm_eps
        self.lm_head_DH = head.lm_head_VH[kept_D].to(device, dtype)
        self.lm_head_VH = head.lm_head_VH.to(device, dtype)
        self.kept_D = kept_D.to(device)
        self.compare: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = compare
        """The function of that name, compiled where training is."""

    def normed(self, last_MH: Tensor) -> Tensor:
        """Final-normed states [M, H], float32."""
        return F.rms_norm(last_MH.float(), self.norm_H.shape, self.norm_H, self.eps)

    def logits(self, last_MH: Tensor) -> Tensor:
        """Of the draft's words [M, D], in the dtype of matrix products."""
        return F.linear(self.normed(last_MH).to(self.lm_head_DH.dtype), self.lm_head_DH)

    @torch.no_grad()
    def probabilities(self, last_MH: Tensor) -> Tensor:
        """softmax over the draft's words [M, D], float32."""
        return self.logits(last_MH).float().softmax(-1)

    @torch.no_grad()
    def choices(self, last_MH: Tensor) -> Tensor:
        """The target's most likely id over its whole vocabulary [M], in pieces that bound memory."""
        rows = (self.normed(piece).to(self.lm_head_VH.dtype) for piece in last_MH.split(512))
        pieces = [F.linear(piece, self.lm_head_VH).argmax(-1) for piece in rows]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long, device=last_MH.device)


def frozen_dtype(target_dtype: torch.dtype, autocast: bool) -> torch.dtype:
    """What the target's frozen embedding and output rows are kept in: its own bfloat16, which loses nothing of them and
    is what products run in under autocast; else float32."""
    return torch.bfloat16 if autocast and target_dtype == torch.bfloat16 else torch.float32


def shifted(values_R: Tensor, by: int, fill: int | bool = 0) -> Tensor:
    """values[p + by] at p; `fill` past the end."""
    return F.pad(values_R[by:], (0, by), value=fill)


def supervised_at(row: Row, step: int) -> Tensor:
    """Indices p of step k whose target, at p+1+k, lies in the same sample and predicts one of its own words [R]."""
    ahead = step + 1
    return shifted(row.supervised_R, ahead, False) & (shifted(row.document_R, ahead, -2) == row.document_R)


@dataclass
class Plan:
    """Which indices of a row ask, and which of them is compared with which supervised token in which step.

    M and J are padded: M so that what is compiled has few shapes, J to whole chunks.
    """

    at_M: Tensor
    """Indices that ask, ascending; padded with the last one."""
    needed_J: Tensor
    """Supervised tokens: their last state is the target; padded with 0."""
    slot_KJ: Tensor
    """Which of the M is compared with token j in step k; M where none is."""

    valid_KJ: Tensor
    """Where something is compared."""

    @classmethod
    def of(cls, row: Row, steps: int, chunk: int, multiple: int) -> "Plan":
        """Two numbers are read from the device: how many ask, and how many tokens are supervised."""
        asks_KR = torch.stack([supervised_at(row, step) for step in range(steps)])
        at = asks_KR.any(0).nonzero().squeeze(-1)
        needed = row.supervised_R.nonzero().squeeze(-1)
        device, length = at.device, row.tokens_R.shape[0]
        # of a dimension of one, a block of queries here, torch.compile makes a graph of its own
        asking = max(-(-len(at) // multiple), 2) * multiple
        last = at[-1:] if len(at) else at.new_zeros(1)
        at_M = torch.cat([at, last.expand(asking - len(at))])
        needed_J = F.pad(needed, (0, -len(needed) % chunk))
        slot_R = at.new_full((length,), asking).index_copy(0, at, torch.arange(len(at), device=device))
        index_KJ = needed_J - 1 - torch.arange(steps, device=device)[:, None]
        real_J = torch.arange(len(needed_J), device=device) < len(needed)
        valid_KJ = real_J & (index_KJ >= 0)
        index_KJ = index_KJ.clamp(min=0)
        valid_KJ &= asks_KR.gather(1, index_KJ)
        return cls(at_M, needed_J, torch.where(valid_KJ, slot_R[index_KJ], asking), valid_KJ)


def unroll(
    draft: Draft,
    target: TargetHead,
    row: Row,
    steps: int,
    noise: Tensor | None,
    *,
    exact: bool,
    scale_K: Tensor | None = None,
) -> StepSums:
    """Run `steps` TTT steps over a row and sum up loss and agreement.

    `exact` compares with the target's choice over its whole vocabulary (validation: it is what decides
    acceptance); otherwise with its choice among the draft's words, which training has at hand.
    `noise` [R, L, H] is added to the aux states, never to what the targets come from.
    `scale_K` is what each step's sum is multiplied by in `total` (default 1): gradients are made along with the losses.
    """
    length, device = row.tokens_R.shape[0], row.tokens_R.device
    # only what is compiled is padded
    plan = Plan.of(row, steps, *((chunk_of(length, steps), draft.asking_multiple) if draft.flex else (1, 1)))
    normed_KMH = _states(draft, row, steps, noise, plan.at_M)
    scale_K = torch.ones(steps, device=device) if scale_K is None else scale_K
    with_gradient = torch.is_grad_enabled() and normed_KMH.requires_grad
    losses = Losses(draft.lm_head.weight, target, normed_KMH.detach(), scale_K, with_gradient)
    hit_KJ = losses.over(row.last_RH, plan, exact)
    total: Any = (scale_K * losses.sum_K).sum()
    if losses.of_states is not None:
        total = _Known.apply(total, normed_KMH, draft.lm_head.weight, losses.of_states, losses.of_weight)
    return StepSums(losses.sum_K, *_agreement(plan, hit_KJ), total)


def compile_step(
    draft: Draft, target: TargetHead, backend: str = "inductor", *, asking_multiple: int = BLOCK, dynamic: bool = True
) -> None:
    """Have both parts of `unroll` compiled at first use: the draft's K steps as one graph, and one chunk's comparison.

    The draft's graph is made for the first row, and with `dynamic` once more for all numbers of asking indices;
    without, once for each multiple of `asking_multiple` of them that occurs. The chunk's shapes are fixed. Attention
    becomes `flex`: documents are no part of a graph.
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    # the gradients of all weights are finished in step 0, the last one of the backward pass: cutting the graph where
    # DistributedDataParallel's buckets end would overlap nothing, and it cannot be cut around attention
    config.optimize_ddp = False
    config.recompile_limit = max(config.recompile_limit, 64)
    draft.flex, draft.asking_multiple = True, asking_multiple
    draft.compile(fullgraph=True, dynamic=None if dynamic else False, backend=backend)
    target.compare = torch.compile(compare, fullgraph=True, dynamic=False, backend=backend)


def compile_now(draft: Draft, compute: Callable[[], object]) -> None:
    """Have the draft's graph made by `compute`, which runs what is to be compiled on a full row.

    torch.compile makes a graph for the first number of asking indices that it meets, and one for all numbers when it
    meets another. The first is one that no row has here, so that each row, of a resumed run too, runs the same graph.
    """
    usual = draft.asking_multiple
    for multiple in (usual + 1, usual):
        draft.asking_multiple = multiple
        compute()


def chunk_of(length: int, steps: int) -> int:
    """Supervised tokens of one chunk, for rows of a length."""
    return min(max(1, CHUNK_ROWS // steps), length)


def _states(draft: Draft, row: Row, steps: int, noise: Tensor | None, at_M: Tensor) -> Tensor:
    """Final-normed states [K, M, H] of the draft at the indices that ask."""
    aux_RLH = row.aux_RLH if noise is None else row.aux_RLH.float() + noise
    step_K = torch.arange(steps, device=at_M.device)[:, None]
    whole, asking = Sight(row.documents), Sight(row.documents, at_M)
    if draft.flex:
        starts_R = starts_of(row.documents, len(row.tokens_R)).to(at_M.device, non_blocking=True)
        asking.blocks = block_mask(starts_R, at_M)
        if len(draft.layers) > 1:
            whole.blocks = block_mask(starts_R, torch.arange(len(starts_R), device=at_M.device))
    tokens = F.pad(row.tokens_R, (0, steps))
    return draft(
        aux_RLH,
        tokens[1 : 1 + len(row.tokens_R)],
        draft.rotation(row.positions_R),
        tokens[at_M + 1 + step_K],
        draft.rotation(row.positions_R[at_M] + step_K),
        (whole, asking),
    )


class Losses:
    """Sums the steps' losses chunk by chunk, and their gradients with respect to the draft's states and output rows."""

    def __init__(self, weight_DH: Tensor, target: TargetHead, normed_KMH: Tensor, scale_K: Tensor, gradients: bool):
        self.target, self.normed_KMH, self.scale_K = target, normed_KMH, scale_K
        self.weight_DH = weight_DH.detach().to(normed_KMH.dtype)
        self.sum_K = scale_K.new_zeros(len(scale_K))
        self.of_states = torch.zeros_like(normed_KMH) if gradients else None
        self.of_weight = torch.zeros_like(weight_DH) if gradients and weight_DH.requires_grad else None

    @torch.no_grad()
    def over(self, last_RH: Tensor, plan: Plan, exact: bool) -> Tensor:
        """Add all supervised tokens. Returns whether the draft's first choice was the target's [K, J]."""
        steps, queries, _ = self.normed_KMH.shape
        chunk = chunk_of(len(last_RH), steps)
        first_K = torch.arange(steps, device=last_RH.device)[:, None] * queries
        hits = [torch.zeros_like(plan.slot_KJ[:, :0], dtype=torch.bool)]
        # of nothing, split makes an empty piece
        pieces = zip(plan.needed_J.split(chunk), plan.slot_KJ.split(chunk, dim=1), strict=True)
        for needed_C, slot_KC in pieces if len(plan.needed_J) else ():
            # what is compared with nothing weighs nothing, so that its place may be any
            at = (first_K + slot_KC.clamp(max=queries - 1)).flatten()
            hits.append(self._add(last_RH[needed_C], at, slot_KC < queries, exact))
        return torch.cat(hits, dim=1)

    def _add(self, last_CH: Tensor, at: Tensor, valid_KC: Tensor, exact: bool) -> Tensor:
        x = self.normed_KMH.flatten(0, 1).index_select(0, at)
        target, with_gradient = self.target, self.of_states is not None
        loss_K, choice_KC, target_choice_C, of_logits, of_x = target.compare(
            x, last_CH, self.weight_DH, target, valid_KC, self.scale_K, with_gradient
        )
        self.sum_K += loss_K
        if self.of_states is not None:
            self.of_states.flatten(0, 1).index_add_(0, at, of_x)
        if self.of_weight is not None:
            _add_product(self.of_weight, of_logits.t(), x)
        wanted_C = target.choices(last_CH) if exact else target.kept_D[target_choice_C]
        return target.kept_D[choice_KC] == wanted_C


def compare(
    x: Tensor,
    last_CH: Tensor,
    weight_DH: Tensor,
    target: TargetHead,
    valid_KC: Tensor,
    scale_K: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cross entropy of one chunk of supervised tokens in all steps, against the target's distribution.

    x [K C, H] are the draft's normed states, last [C, H] the target's. Returns the losses' sums [K], the draft's first
    choices [K, C], the target's [C], and the scaled losses' gradients with respect to the logits [K C, D] and to x
    (empty without `with_gradient`). Softmax and sums are float32, and products run in the weights' dtype.
    """
    kept_KCD = (*valid_KC.shape, len(weight_DH))
    of_target_CD = target.logits(last_CH).float()
    logits_KCD = F.linear(x, weight_DH).float().view(kept_KCD)
    probability_CD = of_target_CD.softmax(-1)
    log_probability_KCD = logits_KCD.log_softmax(-1)
    loss_KC = -(probability_CD * log_probability_KCD).sum(-1)
    loss_K = torch.where(valid_KC, loss_KC, 0.0).sum(-1)
    of_logits = of_x = x.new_empty(0)
    if with_gradient:
        scale_KC1 = torch.where(valid_KC, scale_K[:, None], 0.0)[..., None]
        of_log_KCD = probability_CD * -scale_KC1
        of_logits = torch.ops.aten._log_softmax_backward_data(of_log_KCD, log_probability_KCD, -1, torch.float32)
        of_logits = of_logits.to(x.dtype).flatten(0, 1)
        of_x = of_logits @ weight_DH
    return loss_K, logits_KCD.argmax(-1), of_target_CD.argmax(-1), of_logits, of_x


def _add_product(sum_DH: Tensor, a_DJ: Tensor, b_JH: Tensor) -> None:
    """sum += a @ b, in float32 also where a and b are bfloat16: on a GPU without a product in between."""
    if sum_DH.is_cuda and a_DJ.dtype != sum_DH.dtype:
        torch.addmm(sum_DH, a_DJ, b_JH, out_dtype=sum_DH.dtype, out=sum_DH)
    else:
        sum_DH += a_DJ @ b_JH


class _Known(torch.autograd.Function):
    """A number whose gradients with respect to the draft's states and output rows are known already."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, states: Tensor, weight: Tensor, of_states: Tensor, of_weight: Tensor | None
    ) -> Tensor:
        ctx.known = of_states, of_weight
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        of_states, of_weight = ctx.known
        ctx.known = None, None  # one backward pass: they are given away, not copied
        return None, of_states.mul_(gradient), None if of_weight is None else of_weight.mul_(gradient), None, None


def _agreement(plan: Plan, hit_KJ: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [K], and at how many indices this step and all earlier ones hit [K]; without a target none misses."""
    queries = len(plan.at_M)
    shape = (len(hit_KJ), queries + 1)  # the last column takes what is compared with nothing
    hit = torch.ones(shape, dtype=torch.bool, device=hit_KJ.device).scatter(1, plan.slot_KJ, hit_KJ)[:, :queries]
    counted = torch.zeros(shape, dtype=torch.bool, device=hit_KJ.device).scatter(1, plan.slot_KJ, plan.valid_KJ)
    alive = hit.int().cumprod(0).bool()
    return plan.valid_KJ.sum(1).float(), (alive & counted[:, :queries]).sum(1).float()
