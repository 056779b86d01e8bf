"""The two trainers that `benchmarks.train` compares, the rows that both are given, and what a step has to compute.

Shapes: R tokens of a row, M indices that ask (pipeline.train.loss), J supervised tokens, K steps, H hidden,
D draft words.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeline.target import Head
from pipeline.train.data import PADDING, Row
from pipeline.train.loss import supervised_at

AUX_LAYERS = [2, 30, 58]
EPS = 1e-5
RATE, DECAY = 1e-4, 0.1
"""Learning rate, and Muon's weight decay."""
MOST_TURNS = 4
"""Of a synthetic conversation: a prompt and an answer each."""


@dataclass(frozen=True)
class Setting:
    """One comparison: the draft's sizes and the rows."""

    hidden: int = 7168
    inner: int = 18432
    heads: int = 64
    head_dim: int = 128
    words: int = 32000
    vocabulary: int = 163840
    tokens: int = 8192
    """Of a row, one row a step."""
    longest: int = 2048
    """Tokens of a document at most."""
    supervised: float = 0.6
    """Share of tokens that are the target's own: in answers, between prompts."""
    steps: int = 3
    train_lm_head: bool = False
    optimizer: str = "adamw"
    reference_loss: str = "fused"
    warmup: int = 4
    iterations: int = 10
    rows: int = 4
    """Different rows, taken in turn: their numbers of documents and of supervised tokens differ."""

    @property
    def trained(self) -> int:
        """Parameters that the optimiser steps."""
        attention = 7 * self.heads * self.head_dim * self.hidden  # q, k and v of two inputs, o of one
        layer = attention + 3 * self.hidden * self.inner
        return layer + 3 * self.hidden**2 + (self.hidden * self.words if self.train_lm_head else 0)


TINY = Setting(64, 128, 4, 16, 200, 300, 256, 96, warmup=1, iterations=2)


def make_row(setting: Setting, seed: int, dtype: torch.dtype, device: torch.device) -> Row:
    """A full row of conversations, each of prompts and answers in turn; states are random."""
    generator = torch.Generator().manual_seed(seed)
    length = setting.tokens
    document_R, position_R = torch.full((length,), PADDING), torch.zeros(length, dtype=torch.long)
    own_R, documents, start = torch.zeros(length, dtype=torch.bool), [], 0
    while start < length:
        size = int(torch.randint(setting.longest // 4, setting.longest + 1, (1,), generator=generator))
        end = min(start + size, length)
        document_R[start:end], position_R[start:end] = len(documents), torch.arange(end - start)
        turns = int(torch.randint(1, MOST_TURNS + 1, (1,), generator=generator))
        borders = [start + (end - start) * n // turns for n in range(turns + 1)]
        for begin, until in pairwise(borders):
            own_R[begin + round((until - begin) * (1 - setting.supervised)) : until] = True
        documents.append((start, end))
        start = end
    same_R = torch.cat([document_R[1:] == document_R[:-1], torch.zeros(1, dtype=torch.bool)])
    supervised_R = torch.cat([own_R[1:], own_R[:1] & False]) & same_R
    tokens_R = torch.randint(0, setting.vocabulary, (length,), generator=generator)
    on_device = torch.Generator(device).manual_seed(seed)
    shape = (length, 4, setting.hidden)
    states = torch.empty(shape, dtype=dtype, device=device).normal_(generator=on_device)
    row = Row(tokens_R, position_R, document_R, supervised_R, states[:, :3], states[:, 3], documents)
    return row.to(device)


def operations(setting: Setting, row: Row, *, all_of_it: bool) -> float:
    """Floating-point operations of the matrix products of one step over a row, forward and backward.

    Two for each weight and token it is applied to in the forward pass; for the backward pass as many again for the
    input and for the weight (fc needs no input's, a frozen lm_head no weight's, the target's words neither). Attention:
    4 E a head and visible pair forward, 2.5 times that backward. `all_of_it`: every index asks and has logits in every
    step; otherwise only where the loss needs them. Optimiser, norms and softmax are not counted.
    """
    length, steps, hidden = setting.tokens, setting.steps, setting.hidden
    wide = setting.heads * setting.head_dim
    asks = torch.stack([supervised_at(row, step) for step in range(steps)]).any(0)
    asking, supervised = (length, length) if all_of_it else (int(asks.sum()), int(row.supervised_R.sum()))
    keys = 2 * 2 * hidden * wide * (length + (steps - 1) * asking)  # step 0 needs those of every index
    rest = (2 * hidden * wide + wide * hidden + 3 * hidden * setting.inner) * steps * asking
    head = hidden * setting.words * supervised
    pairs = float((row.positions_R + 1)[slice(None) if all_of_it else asks].sum()) * steps
    attention = 4 * setting.head_dim * setting.heads * pairs * 3.5
    lm_head = head * steps * (3 if setting.train_lm_head else 2)
    return 2.0 * (3 * (keys + rest) + 2 * 3 * hidden**2 * length + lm_head + head) + attention


@dataclass
class Trained:
    """What one side measured. `graphs`: compiled during warm-up, and after it."""

    side: str
    tokens_per_s: float
    peak_bytes: int
    losses: list[float]
    graphs: tuple[int, int]
    step_s: list[float]
    operations_all: float
    """Of a mean step if everything were computed: the same for both sides."""
    operations_done: float
    """Of a mean step as far as the side computes it."""
    matrix_rate: float | None = None
    """Operations per second of a plain bf16 product on this card."""

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(side: str, setting: Setting) -> Trained:
    """Warm up and time one side in this process."""
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    rows = [make_row(setting, seed, dtype, device) for seed in range(setting.rows)]
    step = SIDES[side](setting, device)
    losses = [step(rows[n % len(rows)]) for n in range(setting.warmup)]
    warm = counters["stats"]["unique_graphs"]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for n in range(setting.iterations):
        begun = time.perf_counter()
        losses.append(step(rows[n % len(rows)]))  # reads the loss, so that the step is done
        times.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    used = [rows[n % len(rows)] for n in range(setting.iterations)]
    counted = [sum(operations(setting, row, all_of_it=v) for row in used) / len(used) for v in (True, False)]
    return Trained(
        side,
        setting.tokens * setting.iterations / sum(times),
        peak,
        losses,
        (warm, counters["stats"]["unique_graphs"] - warm),
        times,
        counted[0],
        counted[1] if side == "aerie" else counted[0],
        _matrix_rate(device) if cuda else None,
    )


def _matrix_rate(device: torch.device) -> float:
    """Operations per second of products of 8192 x 8192, bfloat16."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        torch.mm(a, b)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(50):
        torch.mm(a, b)
    torch.cuda.synchronize()
    return 50 * 2 * 8192.0**3 / (time.perf_counter() - begun)


Step = Callable[[Row], float]
"""Forward, backward, clipping and optimiser over a row; the loss, a mean over supervised tokens, summed over steps."""


def _llama(setting: Setting, **more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=setting.hidden,
        intermediate_size=setting.inner,
        num_hidden_layers=1,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.heads,
        head_dim=setting.head_dim,
        rms_norm_eps=EPS,
        max_position_embeddings=262144,
        vocab_size=setting.vocabulary,
        **more,
    )


def aerie(setting: Setting, device: torch.device) -> Step:
    """Ours, as pipeline.train.loop runs it."""
    from pipeline.config import TrainSection
    from pipeline.train.draft import Draft
    from pipeline.train.loss import TargetHead, compile_step, unroll
    from pipeline.train.optimizer import make_optimizer

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        embedding_VH, lm_head_VH = (
            torch.empty(setting.vocabulary, setting.hidden, dtype=dtype).normal_(0, 0.02) for _ in range(2)
        )
        head = Head(embedding_VH, torch.ones(setting.hidden), lm_head_VH, EPS)
        config = _llama(setting, draft_vocab_size=setting.words, norm_before_residual=True)
        draft = Draft(config, embedding_VH)
        _fill(draft)
        target = TargetHead(head, torch.arange(setting.words), device, dtype)
    draft.lm_head.weight.requires_grad_(setting.train_lm_head)
    if device.type == "cuda":
        compile_step(draft, target)
    own: Any = {"optimizer": setting.optimizer, "learning_rate": RATE, "muon_weight_decay": DECAY}
    optimizer = make_optimizer(draft, TrainSection(**own))

    def step(row: Row) -> float:
        count_K = torch.stack([supervised_at(row, k).sum() for k in range(setting.steps)])
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            sums = unroll(draft, target, row, setting.steps, None, exact=False, scale_K=1 / count_K)
        sums.total.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        return float(sums.total.detach())

    return step


def speculators(setting: Setting, device: torch.device) -> Step:
    """speculators 0.9.0's model, loss and optimiser, by its trainer's order of calls."""
    from speculators.config import SpeculatorsConfig, VerifierConfig  # type: ignore[reportMissingImports]
    from speculators.losses import resolve_loss_config  # type: ignore[reportMissingImports]
    from speculators.models.eagle3 import Eagle3SpeculatorConfig  # type: ignore[reportMissingImports]
    from speculators.models.eagle3.core import Eagle3DraftModel  # type: ignore[reportMissingImports]
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # type: ignore[reportMissingImports]
    from speculators.train.optimizers import build_optimizers  # type: ignore[reportMissingImports]

    layers = _llama(setting)
    layers._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    proposal: Any = GreedyTokenProposalConfig(speculative_tokens=setting.steps)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=setting.words,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=AUX_LAYERS,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    with device:
        model: Any = Eagle3DraftModel(config)
    model.to(device)
    model.load_vocab_mappings(
        torch.arange(setting.vocabulary) < setting.words, torch.zeros(setting.words, dtype=torch.long)
    )
    _fill(model)
    model.lm_head.weight.requires_grad_(setting.train_lm_head)
    muon = {"momentum": 0.95, "weight_decay": DECAY, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw", "lr": RATE}
    own = {"optimizer": setting.optimizer, "lr": RATE, "weight_decay": 0.0}
    optimizers = build_optimizers(model, SimpleNamespace(**own, **{f"muon_{key}": muon[key] for key in muon}))
    loss_config = resolve_loss_config("kl_div", setting.reference_loss if device.type == "cuda" else "eager")

    def step(row: Row) -> float:
        ahead = {name: _next(getattr(row, name)) for name in ("tokens_R", "last_RH", "supervised_R")}
        with torch.autocast(device.type, torch.bfloat16):
            _, loss, _ = model(
                hidden_states=row.aux_RLH.flatten(1)[None],
                input_ids=ahead["tokens_R"][None],
                document_ids=row.document_R[None],
                loss_mask=ahead["supervised_R"][None],
                position_ids=row.positions_R[None],
                verifier_last_hidden_states=ahead["last_RH"][None],
                ttt_steps=setting.steps,
                ttt_step_loss_decay=1.0,
                loss_config=loss_config,
            )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return float(loss.detach())

    return step


def _next(values_R: Tensor) -> Tensor:
    """Of p + 1 at p."""
    return torch.cat([values_R[1:], torch.zeros_like(values_R[:1])])


@torch.no_grad()
def _fill(model: torch.nn.Module) -> None:
    """Random matrices, norms of one."""
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0, 0.02)


SIDES: dict[str, Callable[[Setting, torch.device], Step]] = {"aerie": aerie, "speculators": speculators}
