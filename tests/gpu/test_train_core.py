"""The compiled training step on a GPU: against the plain one on the CPU, and how often it is compiled."""

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.train.loss import TargetHead, compile_step, unroll
from tests.unit.test_train_loss import STEPS, make_head, make_row
from tests.unit.test_train_loss import make_draft as make_small

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: it runs its kernels"),
    pytest.mark.filterwarnings("default"),  # of whatever versions that machine has
]
CPU = torch.device("cpu")
ROWS = [([300, 80], 0.5), ([500], 0.1), ([100] * 5, 0.9), ([1, 2, 3, 400], 0.6), ([250, 250], 0.95), ([40] * 10, 0.3)]


def make_draft(**sizes):
    return make_small(width=64, **sizes)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 2e-3), (True, 5e-2)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_step_gives_the_plain_ones_losses_and_gradients(layers, autocast, tolerance, dynamic):
    """Float32 products may be TF32's in attention; bfloat16's rounding is that of single products."""
    torch._dynamo.reset()
    sizes = {"heads": 4, "kv_heads": 2, "layers": layers}
    plain, compiled, (head, kept_D) = make_draft(**sizes), make_draft(**sizes).cuda(), make_head()
    targets = [TargetHead(head, kept_D, device) for device in (CPU, torch.device("cuda"))]
    compile_step(compiled, targets[1], asking_multiple=128 if dynamic else 256, dynamic=dynamic)
    for lengths, share in ROWS:
        row = make_row(lengths, 512 - sum(lengths), share)
        want = unroll(plain, targets[0], row, STEPS, None, exact=False)
        want.total.backward()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            got = unroll(compiled, targets[1], row.to(torch.device("cuda")), STEPS, None, exact=False)
        got.total.backward()
        torch.testing.assert_close(got.loss.cpu(), want.loss, rtol=tolerance, atol=0)
        assert got.count.tolist() == want.count.tolist()
        for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            off = (other.grad.cpu() - one.grad).norm() / one.grad.norm()
            assert float(off) < tolerance, name
        plain.zero_grad()
        compiled.zero_grad()
    graphs = counters["stats"]["unique_graphs"]
    for lengths, share in ROWS:
        row = make_row(lengths, 512 - sum(lengths), share).to(torch.device("cuda"))
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            unroll(compiled, targets[1], row, STEPS, None, exact=False).total.backward()
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again"
