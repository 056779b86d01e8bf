"""Losses and the gradient of every parameter, against the plain reference in float64 (tests/reference_loss.py)."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from pipeline.target import Head
from pipeline.train.data import PADDING, Row
from pipeline.train.draft import Draft
from pipeline.train.loss import TargetHead, unroll
from tests.reference_loss import Document, Sizes, TargetWords, losses

HIDDEN, INNER, VOCABULARY, WORDS, WIDTH, STEPS = 24, 40, 50, 17, 8, 3
WEIGHTS = [1.0, 0.7, 0.4]
"""Of the steps' losses, as train.ttt_decay gives them."""
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}


def make_draft(heads: int = 3, kv_heads: int = 3, layers: int = 1, yarn: bool = False, before: bool = True) -> Draft:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=WIDTH,
        rms_norm_eps=1e-5,
        rope_theta=100.0,
        rope_scaling=YARN if yarn else None,
        max_position_embeddings=128,
        vocab_size=VOCABULARY,
        draft_vocab_size=WORDS,
        norm_before_residual=before,
        dtype="float32",
    )
    torch.manual_seed(3)
    draft = Draft(config, torch.randn(VOCABULARY, HIDDEN))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(0, 0.2)
    return draft


def make_row(lengths: list[int], padding: int, supervised: float = 0.6) -> Row:
    """Documents of these lengths one after the other; a share of the tokens is the target's own."""
    generator = torch.Generator().manual_seed(5)
    size = sum(lengths) + padding
    row = Row(
        torch.randint(0, VOCABULARY, (size,), generator=generator),
        torch.zeros(size, dtype=torch.long),
        torch.full((size,), PADDING),
        torch.zeros(size, dtype=torch.bool),
        torch.randn(size, 3, HIDDEN, generator=generator),
        torch.randn(size, HIDDEN, generator=generator) * 2,
        [],
    )
    start = 0
    for number, length in enumerate(lengths):
        end = start + length
        row.positions_R[start:end], row.document_R[start:end] = torch.arange(length), number
        row.supervised_R[start : end - 1] = torch.rand(length - 1, generator=generator) < supervised
        row.documents.append((start, end))
        start = end
    return row


def make_head() -> tuple[Head, Tensor]:
    """The target's frozen parts and the ids of the draft's words."""
    generator = torch.Generator().manual_seed(9)
    embedding, rows = (torch.randn(VOCABULARY, HIDDEN, generator=generator) for _ in range(2))
    norm = torch.rand(HIDDEN, generator=generator) + 0.5
    kept_D = torch.randperm(VOCABULARY, generator=generator)[:WORDS].sort().values
    return Head(embedding, norm, rows * 0.4, 1e-5), kept_D


def by_definition(
    draft: Draft, head: Head, kept_D: Tensor, row: Row, noise: Tensor | None
) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Losses, counts and gradients of the weighted sum of the steps' mean losses, of the reference."""
    config = draft.config
    sizes = Sizes(WIDTH, 1e-5, 100.0, config.norm_before_residual, YARN if config.rope_scaling else None)
    target = TargetWords(
        head.norm_H.double(), head.lm_head_VH[kept_D].double(), draft.embedding_VH.double(), head.rms_norm_eps
    )
    aux_RLH = row.aux_RLH if noise is None else row.aux_RLH + noise
    documents = [
        Document(
            row.tokens_R[start:end].tolist(),
            aux_RLH[start:end].flatten(1).double(),
            row.last_RH[start:end].double(),
            [False, *row.supervised_R[start : end - 1].tolist()],
        )
        for start, end in row.documents
    ]
    weights = {name: p.detach().double().requires_grad_() for name, p in draft.named_parameters()}
    sums, counts = losses(weights, sizes, target, documents, STEPS)
    total = sum(w * loss / max(count, 1) for w, loss, count in zip(WEIGHTS, sums, counts, strict=True))
    assert isinstance(total, Tensor)
    total.backward()
    gradients = {name: w.grad if w.grad is not None else torch.zeros_like(w) for name, w in weights.items()}
    return [float(loss.detach()) for loss in sums], counts, gradients


def by_trainer(
    draft: Draft, head: Head, kept_D: Tensor, row: Row, noise: Tensor | None, counts: list[int]
) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """The same of the trainer."""
    target = TargetHead(head, kept_D, torch.device("cpu"))
    scale_K = torch.tensor(WEIGHTS) / torch.tensor(counts).clamp(min=1)
    sums = unroll(draft, target, row, STEPS, noise, exact=False)
    (scale_K * sums.loss).sum().backward()
    gradients = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    return sums.loss.tolist(), [int(c) for c in sums.count], gradients


CASES: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "one document": ({}, [13], 0),
    "packed with padding": ({}, [7, 12, 1, 4, 2], 5),
    "residual without norm": ({"before": False}, [9, 6], 1),
    "grouped heads": ({"heads": 4, "kv_heads": 2}, [9, 6], 3),
    "one key head": ({"heads": 4, "kv_heads": 1}, [9, 6], 3),
    "two layers": ({"layers": 2}, [8, 7], 2),
    "yarn": ({"yarn": True}, [14, 5], 0),
    "all at once": ({"heads": 4, "kv_heads": 2, "layers": 2, "yarn": True}, [11, 3, 8], 4),
}


@pytest.mark.parametrize(("draft", "lengths", "padding"), CASES.values(), ids=CASES.keys())
def test_losses_and_gradients_equal_their_definition(draft, lengths, padding):
    made, row, (head, kept_D) = make_draft(**draft), make_row(lengths, padding), make_head()
    want_losses, counts, want = by_definition(made, head, kept_D, row, None)
    assert min(counts) > 0, "nothing is compared"
    got_losses, got_counts, got = by_trainer(made, head, kept_D, row, None, counts)
    assert got_counts == counts
    assert got_losses == pytest.approx(want_losses, rel=1e-5)
    assert_equal_gradients(got, want)


def test_noise_is_on_the_input_only():
    made, row, (head, kept_D) = make_draft(), make_row([10, 6], 2), make_head()
    noise = torch.rand(row.aux_RLH.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    want_losses, counts, want = by_definition(made, head, kept_D, row, noise)
    got_losses, _, got = by_trainer(made, head, kept_D, row, noise, counts)
    assert got_losses == pytest.approx(want_losses, rel=1e-5)
    assert_equal_gradients(got, want)


def test_a_row_in_which_nothing_is_supervised_has_gradients_of_zero():
    """Several processes reduce the gradients of every parameter: one without any would leave the others waiting."""
    made, row, (head, kept_D) = make_draft(), make_row([6], 4, supervised=0.0), make_head()
    losses, counts, gradients = by_trainer(made, head, kept_D, row, None, [0] * STEPS)
    assert (losses, counts) == ([0.0] * STEPS, [0] * STEPS)
    for name, parameter in made.named_parameters():
        assert torch.equal(gradients[name], torch.zeros_like(parameter)), name


def assert_equal_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Each parameter's, within float32's rounding of its largest element."""
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        largest = float(gradient.abs().max())
        assert largest > 1e-6, f"{name} has no gradient: nothing is compared"
        atol = 2e-6 * largest
        assert torch.allclose(got[name].double(), gradient, rtol=1e-4, atol=atol), name
