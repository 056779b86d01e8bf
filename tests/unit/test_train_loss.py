"""Losses and the gradient of every parameter, against the plain reference in float64 (tests/reference_loss.py)."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig

from pipeline.target import Head
from pipeline.train import loss as loss_module
from pipeline.train.attention import BLOCK, block_mask, starts_of
from pipeline.train.data import PADDING, Row
from pipeline.train.draft import Draft
from pipeline.train.loss import TargetHead, compile_step, unroll
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


def make_draft(
    heads: int = 3, kv_heads: int = 3, layers: int = 1, yarn: bool = False, before: bool = True, width: int = WIDTH
) -> Draft:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
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
    sums = unroll(draft, target, row, STEPS, noise, exact=False, scale_K=scale_K)
    sums.total.backward()
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


@pytest.mark.filterwarnings("ignore")  # PyTorch's: it wants flex_attention compiled
@pytest.mark.parametrize("layers", [1, 2])
def test_the_attention_of_a_gpu_gives_the_same(layers):
    """On the CPU by its plain implementation: mask of blocks, own keys merged in, grouped heads, padding."""
    made, row = make_draft(heads=4, kv_heads=2, layers=layers), make_row([7, 12, 1, 4, 2], 5)
    head, kept_D = make_head()
    want_losses, counts, want = by_definition(made, head, kept_D, row, None)
    made.flex = True
    got_losses, got_counts, got = by_trainer(made, head, kept_D, row, None, counts)
    assert got_counts == counts
    assert got_losses == pytest.approx(want_losses, rel=1e-5)
    assert_equal_gradients(got, want)


def test_blocks_hold_what_is_visible_and_no_more():
    generator = torch.Generator().manual_seed(4)
    documents = [(0, 300), (300, 310), (310, 1500), (1500, 2000)]
    starts_R = starts_of(documents, 2100)
    at = torch.rand(2100, generator=generator).lt(0.6).nonzero().squeeze(-1)
    at_M = torch.cat([at, at[-1:].expand(-len(at) % BLOCK)])
    mask = block_mask(starts_R, at_M)
    key_R = torch.arange(2100)
    visible_MR = (key_R <= at_M[:, None]) & (key_R >= starts_R[at_M][:, None])
    padded = torch.nn.functional.pad(visible_MR, (0, -2100 % BLOCK))
    by_block = padded.view(len(at_M) // BLOCK, BLOCK, -1, BLOCK).transpose(1, 2).flatten(2)
    seen = mask.to_dense()[0, 0].bool()
    assert torch.equal(seen, by_block.any(-1))
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.sum() == by_block.all(-1).sum() > 0


@pytest.mark.parametrize("rows", [6, 7, 9])
def test_losses_do_not_depend_on_the_size_of_a_chunk(rows, monkeypatch):
    made, row, (head, kept_D) = make_draft(), make_row([11, 8], 3), make_head()
    whole = by_trainer(made, head, kept_D, row, None, [1] * STEPS)
    made.zero_grad()
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", rows)
    chunked = by_trainer(made, head, kept_D, row, None, [1] * STEPS)
    assert chunked[0] == pytest.approx(whole[0], rel=1e-6)
    assert_equal_gradients(chunked[2], {name: gradient.double() for name, gradient in whole[2].items()})


def test_agreement_counts_unbroken_hits_from_the_first_step_on():
    made, row, (head, kept_D) = make_draft(), make_row([30, 25], 0), make_head()
    target = TargetHead(head, kept_D, torch.device("cpu"))
    for exact in (False, True):
        sums = unroll(made, target, row, STEPS, None, exact=exact)
        chain = made.begin(row.aux_RLH, row.positions_R, row.documents)
        logits_VR = head.lm_head_VH @ target.normed(row.last_RH).T
        choice_R = logits_VR.argmax(0) if exact else kept_D[logits_VR[kept_D].argmax(0)]
        alive, agreed = [True] * len(row.tokens_R), [0] * STEPS
        for step in range(STEPS):
            tokens_R = torch.nn.functional.pad(row.tokens_R[step + 1 :], (0, step + 1))
            drafted_R = kept_D[made.logits(made.advance(chain, tokens_R)).argmax(-1)]
            for start, end in row.documents:
                for p in range(start, end - 1 - step):
                    if row.supervised_R[p + 1 + step]:
                        alive[p] &= bool(drafted_R[p] == choice_R[p + 1 + step])
                        agreed[step] += alive[p]
        assert sums.agreed.tolist() == agreed
    assert agreed[0] > 0, "nothing is compared"


ROWS = [([300, 80], 0.5), ([500], 0.1), ([100] * 5, 0.9), ([1, 2, 3, 400], 0.6), ([250, 250], 0.95), ([40] * 10, 0.3)]


@pytest.mark.parametrize("dynamic", [True, False])
def test_rows_of_any_content_are_compiled_once(dynamic, monkeypatch):
    """The draft's graph once for the first row and once for all others, or once a multiple, here of two; the comparison
    once."""
    torch._dynamo.reset()
    made, (head, kept_D) = make_draft(heads=4, kv_heads=2), make_head()
    target = TargetHead(head, kept_D, torch.device("cpu"))
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 300)
    compile_step(made, target, "aot_eager", asking_multiple=BLOCK if dynamic else 192, dynamic=dynamic)
    rows = [make_row(lengths, 512 - sum(lengths), share) for lengths, share in ROWS]
    counters.clear()
    for row in rows:
        unroll(made, target, row, STEPS, None, exact=False).total.backward()
    assert counters["stats"]["unique_graphs"] == 3
    for row in reversed(rows):
        unroll(made, target, row, STEPS, None, exact=False).total.backward()
    assert counters["stats"]["unique_graphs"] == 3, "compiled again"
    torch._dynamo.reset()


def assert_equal_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Each parameter's, within float32's rounding of its largest element."""
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        largest = float(gradient.abs().max())
        assert largest > 1e-6, f"{name} has no gradient: nothing is compared"
        atol = 2e-6 * largest
        assert torch.allclose(got[name].double(), gradient, rtol=1e-4, atol=atol), name
