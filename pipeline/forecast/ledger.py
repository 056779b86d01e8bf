"""Counts the memory that PyTorch code would take on a GPU, without a GPU and without the memory.

    with Ledger() as ledger:
        ...            # tensors made here have shapes and no data; their lifetimes are those of real ones
    ledger.at_peak()   # bytes by kind when most was held at once

The code runs as it is, on PyTorch's fake tensors: whatever it keeps for its backward pass is kept here, too, so that
nothing of a model needs to be known. The tensors claim to be on the CPU (PyTorch's backward pass refuses fake GPU
tensors where there is no GPU), and the operations that a GPU computes by other kernels are replaced by those.

What depends on data is taken at its largest: `nonzero` finds every element. A number read from a tensor is 1.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pipeline.train.attention import causal

BLOCK_BYTES = 512
"""PyTorch's CUDA allocator rounds up to a multiple of this (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""
MASK_ALIGNMENT = 8
"""The memory-efficient kernel wants rows of the mask at a multiple of so many elements, and pads others
(aten/native/transformers/attention.cpp, pad_bias)."""
OTHER = "activations"
"""The kind of whatever was not marked."""


@dataclass
class Held:
    """One block of memory: its bytes, and from which allocation or release on it was held, and until which."""

    size_bytes: int
    begin: int
    end: int | None = None
    kind: str = OTHER


class Ledger(TorchDispatchMode):
    """Records every block of memory that PyTorch operations make under it, until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[Held] = []
        self._known: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
        self._time = 0
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> "Ledger":
        self._modes.enter_context(FakeTensorMode())
        self._modes.enter_context(_AsOnGpu())
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._modes.close()

    def mark(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what these tensors are: `at_peak` shows their blocks under this name."""
        for tensor in tensors:
            self._block_of(tensor).kind = kind

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the moment when most was held. Kinds of which nothing was held then are left out."""
        changes = [(block.begin, block.size_bytes) for block in self._blocks]
        changes += [(block.end, -block.size_bytes) for block in self._blocks if block.end is not None]
        held = peak = when = 0
        for time, change in sorted(changes):
            held += change
            if held > peak:
                peak, when = held, time
        kinds: dict[str, int] = {}
        for block in self._blocks:
            if block.begin <= when and (block.end is None or block.end > when):
                kinds[block.kind] = kinds.get(block.kind, 0) + block.size_bytes
        return kinds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1 if not args[0].is_floating_point() else 1.0
        if func is torch.ops.aten.nonzero.default:
            result = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
        else:
            result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._block_of(value)
        if workspace := WORKSPACES.get(func):
            self._release(self._hold(workspace(*args)))
        return result

    def _block_of(self, tensor: Tensor) -> Held:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            block = self._known[storage] = self._hold(storage.nbytes())
            weakref.finalize(storage, self._release, block).atexit = False
        return self._known[storage]

    def _hold(self, size_bytes: int) -> Held:
        block = Held(-(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES, self._tick())
        self._blocks.append(block)
        return block

    def _release(self, block: Held) -> None:
        block.end = self._tick()

    def _tick(self) -> int:
        self._time += 1
        return self._time


class _AsOnGpu(TorchFunctionMode):
    """Where PyTorch has another kernel for a GPU than for the CPU, take what that one keeps and makes."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _memory_efficient_attention(*args, **kwargs)
        if func is F.rms_norm:
            return _rms_norm(*args, **kwargs)
        if func is causal:
            return _FlexAttention.apply(*args[:3])
        return func(*args, **kwargs)


def _memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """The kernel that PyTorch takes on a GPU for attention with a mask (a mask excludes the flash kernels)."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask, 0.0)
        if lacking := -bias.shape[-1] % MASK_ALIGNMENT:
            bias = F.pad(bias, (0, lacking))[..., :-lacking]
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, is_causal)[0]


def _attention_workspace(_gradient: Tensor, query: Tensor, *_: Any) -> int:
    """Bytes in which the memory-efficient kernel's backward pass sums up the query's gradient, for half types.

    float32, as many elements as the query; keys and values are summed up in registers for heads of 128 and less
    (aten/native/transformers/cuda/mem_eff_attention/kernel_backward.h, kNeedsAccumGradQ and kOutputInRF).
    """
    return 4 * query.numel() if query.dtype.itemsize < 4 else 0


WORKSPACES: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: _attention_workspace,
}
"""Memory that a kernel takes and returns within one operation."""


class _FlexAttention(torch.autograd.Function):
    """What flex_attention's kernels keep: inputs, result and one float32 number a query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        result, sums = torch.empty_like(query), torch.empty(query.shape[:-1])
        ctx.save_for_backward(query, key, value, result, sums)
        return result, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        torch.empty_like(sums)  # of each query, its gradient times its result
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _FusedRmsNorm(torch.autograd.Function):
    """What the GPU's kernel keeps: its input and one float32 number a row. The CPU's keeps two more copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.empty(*x.shape[:-1], 1)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is None or weight.dtype != x.dtype:  # PyTorch fuses neither
        return torch.rms_norm(x, shape, weight, eps)
    result = _FusedRmsNorm.apply(x, weight)
    assert isinstance(result, Tensor)
    return result
