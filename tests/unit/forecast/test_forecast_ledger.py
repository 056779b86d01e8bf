"""The ledger against sums done by hand, and against what real tensors keep."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from pipeline.forecast import ledger as ledger_module
from pipeline.forecast.ledger import BLOCK_BYTES, Ledger

ROWS, WIDTH = 64, 256
TENSOR = ROWS * WIDTH * 4


def test_a_block_counts_from_its_making_to_its_release():
    with Ledger() as ledger:
        first = torch.zeros(ROWS, WIDTH)
        del first
        kept = torch.zeros(ROWS, WIDTH)
        view = kept[1:]  # no block of its own
        ledger.mark("second", [view])
        gone = torch.zeros(1)
    assert ledger.at_peak() == {"second": TENSOR, "activations": BLOCK_BYTES}
    del kept, view, gone


def test_training_holds_weights_moments_gradients_and_what_the_backward_pass_needs():
    with Ledger() as ledger:
        weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        optimizer = torch.optim.AdamW([weight], fused=True)
        ledger.mark("weights", [weight])
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.zeros(ROWS, WIDTH)
            F.silu(x @ weight).sum().backward()
            optimizer.step()
        ledger.mark("moments", [v for v in optimizer.state[weight].values() if v.dim()])
        assert weight.grad is not None
        ledger.mark("gradients", [weight.grad])
    matrix = WIDTH * WIDTH * 4
    held = ledger.at_peak()
    assert (held["weights"], held["moments"], held["gradients"]) == (matrix, 2 * matrix, matrix)
    assert 2 * TENSOR <= held["activations"] <= 5 * TENSOR


def test_what_depends_on_data_is_taken_at_its_largest():
    with Ledger():
        mask = torch.zeros(ROWS, dtype=torch.bool)
        assert mask.nonzero().shape == (ROWS, 1)
        assert float(torch.zeros(3).sum()) == 1.0
        assert bool(mask.any()) is True


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 0), (torch.bfloat16, 0)])
def test_attention_with_a_mask_keeps_no_scores(dtype, copies):
    """The CPU's kernel for small or odd masks keeps rows x columns for every head; the GPU's keeps a bias for all."""
    heads, width = 8, 64
    with Ledger() as ledger:
        query = torch.zeros(1, heads, ROWS, width, dtype=dtype, requires_grad=True)
        mask = torch.ones(ROWS, 3 * ROWS, dtype=torch.bool)
        key = torch.zeros(1, heads, 3 * ROWS, width, dtype=dtype)
        ledger.mark("inputs", [query, key, mask])
        F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    scores = heads * ROWS * 3 * ROWS * query.element_size()
    assert ledger.at_peak()["activations"] < scores


def test_a_norm_keeps_its_input_and_a_number_a_row():
    with Ledger() as ledger:
        norm = nn.RMSNorm(WIDTH)
        x = torch.zeros(ROWS, WIDTH, requires_grad=True)
        ledger.mark("inputs", [x, norm.weight])
        y = norm(x)
    assert ledger.at_peak()["activations"] == TENSOR + BLOCK_BYTES  # the result; one number a row
    del y


class Saved:
    """Bytes of the blocks that autograd keeps for the backward pass, of real tensors or of fake ones."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self._kept: list[object] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._kept.append(storage)  # so that no other block gets its number
        self.blocks[id(storage) if tensor.device.type == "meta" else storage._cdata] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self.blocks.values())


def test_fake_tensors_keep_what_real_ones_keep(monkeypatch):
    """The draft, its loss and autocast: a real forward pass on the CPU and the ledger's, on the CPU's own kernels."""
    from tests.forecasting import forward, small_run

    monkeypatch.setattr(ledger_module, "_AsOnGpu", ledger_module.contextlib.nullcontext)
    config, target = small_run()

    def saved() -> int:
        counted = Saved()
        with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda tensor: tensor):
            sums = forward(config, target)
        del sums
        return counted.total

    real = saved()
    gc.collect()
    with Ledger():
        fake = saved()
    assert real > 1_000_000
    assert fake == pytest.approx(real, rel=0.02)
