"""The training loss by its definition: float64, one document, one index, one step and one head at a time.

Nothing of pipeline.train is used, nothing is packed or masked: a query is given the list of the keys that it may see.

At index p, g_p are the target's aux states of position p and x_p its token. TTT step k at index p takes token
x_{p+1+k}, at position p+k, and the states before the final norm of step k-1 at p (step 0: fc(g_p)). It attends to the
keys that step 0 made at 0..p and to those that steps 1..k made at p. Its target is the softmax over the draft's words
of lm_head(final_norm(last_{p+1+k})), which predicts x_{p+2+k}; it counts where that token is
the target's own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sizes:
    """What the weights' shapes do not say."""

    head_dim: int
    eps: float
    rope_theta: float
    norm_before_residual: bool
    yarn: dict[str, float] | None = None
    """factor, original_max_position_embeddings, beta_fast, beta_slow (Peng et al. 2023, arXiv:2309.00071)."""


@dataclass
class Document:
    """One sample: tokens [S], aux states [S, 3 H], last states [S, H]; own[j]: token j is one of the target's own."""

    tokens: list[int]
    aux: Tensor
    last: Tensor
    own: list[bool]


@dataclass
class TargetWords:
    """The target's frozen parts, float64: final norm [H], its rows for the draft's words [D, H], embedding [V, H]."""

    norm: Tensor
    words: Tensor
    embedding: Tensor
    eps: float


def losses(
    weights: dict[str, Tensor], sizes: Sizes, target: TargetWords, documents: list[Document], steps: int
) -> tuple[list[Tensor], list[int]]:
    """Sum of the cross entropies (nats) and number of supervised indices, of each step."""
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(steps)], [0] * steps
    for document in documents:
        states = _states(weights, sizes, target, document, steps)
        for k in range(steps):
            for p in range(len(document.tokens) - 2 - k):
                if not document.own[p + 2 + k]:
                    continue
                normed = _norm(document.last[p + 1 + k], target.norm, target.eps)
                probabilities = torch.softmax(target.words @ normed, 0)
                logits = weights["lm_head.weight"] @ _norm(states[k][p], weights["norm.weight"], sizes.eps)
                sums[k] = sums[k] - (probabilities * (logits - torch.logsumexp(logits, 0))).sum()
                counts[k] += 1
    return sums, counts


def _states(
    weights: dict[str, Tensor], sizes: Sizes, target: TargetWords, document: Document, steps: int
) -> list[list[Tensor]]:
    """States before the final norm, by step and index."""
    size = len(document.tokens)
    layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    cache: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # (layer, step, index): key, value, [heads, E]
    hidden = [weights["fc.weight"] @ document.aux[p] for p in range(size)]
    made = []
    for k in range(steps):
        hidden = hidden[: size - 1 - k]  # there is no token p+1+k after that
        for layer in range(layers):
            own = {
                n.removeprefix(f"layers.{layer}."): w for n, w in weights.items() if n.startswith(f"layers.{layer}.")
            }
            after = []
            for p in range(len(hidden)):
                embedded = target.embedding[document.tokens[p + 1 + k]] if layer == 0 else None
                visible = [(layer, 0, q) for q in range(p + 1)] + [(layer, step, p) for step in range(1, k + 1)]
                after.append(_layer(own, sizes, hidden[p], embedded, p + k, (layer, k, p), visible, cache))
            hidden = after
        made.append(hidden)
    return made


def _layer(own, sizes, hidden, embedded, position, place, visible, cache) -> Tensor:
    """One layer for one token; puts the token's key and value into `cache` at `place`."""
    residual = hidden
    if embedded is None:
        x = _norm(hidden, own["input_layernorm.weight"], sizes.eps)
    else:
        normed = _norm(hidden, own["hidden_norm.weight"], sizes.eps)
        residual = normed if sizes.norm_before_residual else hidden
        x = torch.cat([_norm(embedded, own["input_layernorm.weight"], sizes.eps), normed])
    queries, keys, values = (
        (own[f"self_attn.{name}_proj.weight"] @ x).reshape(-1, sizes.head_dim) for name in ("q", "k", "v")
    )
    cache[place] = torch.stack([_turned(key, position, sizes) for key in keys]), values
    mixed = []
    for head, query in enumerate(queries):
        shared = head // (len(queries) // len(keys))
        turned = _turned(query, position, sizes)
        scores = torch.stack([turned @ cache[v][0][shared] for v in visible]) / math.sqrt(sizes.head_dim)
        mixed.append(sum(w * cache[v][1][shared] for w, v in zip(scores.softmax(0), visible, strict=True)))
    residual = residual + own["self_attn.o_proj.weight"] @ torch.cat(mixed)
    x = _norm(residual, own["post_attention_layernorm.weight"], sizes.eps)
    gate, up = own["mlp.gate_proj.weight"] @ x, own["mlp.up_proj.weight"] @ x
    return residual + own["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _turned(x: Tensor, position: int, sizes: Sizes) -> Tensor:
    """Rotary position, each pair (i, i + E/2) by its own angle."""
    half, length = sizes.head_dim // 2, 1.0
    turned = [None] * sizes.head_dim
    for i in range(half):
        frequency = sizes.rope_theta ** (-2 * i / sizes.head_dim)
        if sizes.yarn:
            frequency *= _yarn(i, sizes)
            length = 0.1 * math.log(sizes.yarn["factor"]) + 1
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        turned[i] = (x[i] * cos - x[half + i] * sin) * length
        turned[half + i] = (x[half + i] * cos + x[i] * sin) * length
    return torch.stack(turned)


def _yarn(i: int, sizes: Sizes) -> float:
    """By how much yarn slows pair i: 1 for pairs that turn fast, 1 / factor for slow ones, a line between."""
    yarn = sizes.yarn

    def pair_with(turns: float) -> float:
        wave = yarn["original_max_position_embeddings"] / (2 * math.pi * turns)
        return sizes.head_dim * math.log(wave) / (2 * math.log(sizes.rope_theta))

    low = max(math.floor(pair_with(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_with(yarn["beta_slow"])), sizes.head_dim - 1)
    slow = min(max((i - low) / (high - low or 0.001), 0), 1)
    return slow / yarn["factor"] + 1 - slow
