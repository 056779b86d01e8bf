"""The ledger against sums done by hand, and against what real tensors keep."""

import contextlib
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from pipeline.forecast import ledger as ledger_module
from pipeline.forecast.ledger import BLOCK_BYTES, Ledger
from pipeline.train import attention
from pipeline.train.checkpoint import Progress
from tests.forecasting import make_trainer, small_run

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_mask_keeps_one_bias_for_all_heads(dtype):
    """And no scores. Its backward pass sums up a half-type query's gradient in float32."""
    heads, width = 8, 64
    with Ledger() as ledger:
        query = torch.zeros(1, heads, ROWS, width, dtype=dtype, requires_grad=True)
        mask = torch.ones(ROWS, 3 * ROWS, dtype=torch.bool)
        key, value = (torch.zeros(1, heads, 3 * ROWS, width, dtype=dtype, requires_grad=True) for _ in range(2))
        ledger.mark("inputs", [query, key, value, mask])
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        forward = ledger.at_peak()["activations"]
        torch.autograd.grad(result, [query, key, value], torch.zeros_like(result))
    seeds, log_sums = 2 * BLOCK_BYTES, heads * ROWS * 4
    made = result.untyped_storage().nbytes()
    held = mask.numel() * dtype.itemsize + made + log_sums + seeds
    gradients = (query.numel() + key.numel() + value.numel()) * dtype.itemsize
    workspace = 4 * query.numel() if dtype == torch.bfloat16 else 0
    assert forward == held
    assert ledger.at_peak()["activations"] == held + made + gradients + workspace


def test_a_norm_keeps_its_input_and_a_number_a_row():
    with Ledger() as ledger:
        norm = nn.RMSNorm(WIDTH)
        x = torch.zeros(ROWS, WIDTH, requires_grad=True)
        ledger.mark("inputs", [x, norm.weight])
        y = norm(x)
    assert ledger.at_peak()["activations"] == TENSOR + BLOCK_BYTES  # the result; one number a row
    del y


@pytest.mark.filterwarnings("ignore")  # the profiler's, about itself
@pytest.mark.parametrize(
    "train",
    [
        {"tokens_per_row": 512},
        {"rows_per_step": 2, "train_lm_head": False},
        {"autocast": False, "noise": 0.1},
        {"num_layers": 2, "ttt_steps": 5},
    ],
    ids=str,
)
def test_training_on_fake_tensors_takes_what_real_training_takes(tmp_path, monkeypatch, train):
    """Two steps and a validation of the trainer, on the CPU's own kernels in both: PyTorch's allocator against us."""
    config, target = small_run(tmp_path, epochs=1, checkpoint_steps=2, **train)
    monkeypatch.setattr(ledger_module, "_AsOnGpu", contextlib.nullcontext)
    monkeypatch.setattr(attention, "causal", plainly_causal)

    def run() -> None:
        trainer = make_trainer(config, target)
        trainer.draft.flex = True
        trainer.run(Progress(), lambda _: None, lambda *_: None)

    real = peak_of(run)
    with Ledger() as ledger:
        run()
    assert real > 20_000_000
    assert sum(ledger.at_peak().values()) == pytest.approx(real, rel=0.02)


def plainly_causal(query, key, value, _blocks):
    """In place of a GPU's kernel, with all scores, over rows whose every index asks."""
    key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
    scores = (query @ key.transpose(1, 2)).float() / query.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    log_sums = scores.masked_fill(~seen, -1e9).logsumexp(-1)
    return (scores - log_sums[..., None]).exp().to(value.dtype) @ value, log_sums


def test_attention_of_a_gpu_keeps_one_number_a_query_and_head():
    heads, width = 8, 64
    with Ledger() as ledger:
        query, key, value = (torch.zeros(n, ROWS, width, requires_grad=True) for n in (heads, 2, 2))
        ledger.mark("inputs", [query, key, value])
        result, sums = attention.causal(query, key, value, None)
        forward = ledger.at_peak()["activations"]
        torch.autograd.grad(result, [query, key, value], torch.zeros_like(result))
    made, log_sums = heads * ROWS * width * 4, heads * ROWS * 4
    assert forward == made + log_sums
    assert ledger.at_peak()["activations"] == forward + made + made + made // 4 * 2 + log_sums
    del sums


def peak_of(run: Callable[[], None]) -> int:
    """Most bytes that PyTorch's CPU allocator had given out at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
