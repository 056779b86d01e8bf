"""Attention of TTT steps over packed documents: step 0's keys causally, and each later step's own key.

Shapes: R tokens of a row, M of them that ask, N heads, K key/value heads (each serves N / K heads), E head width.

Only some indices ask: a step's states matter where the loss looks at them or at those of a later step, while the keys
of step 0 are needed everywhere. So queries are a sorted selection of the row, keys are the row.

Two kernels give the same numbers. `flex` (GPU) runs torch's flex_attention over a block mask for the causal part, with
the logarithm of the softmax's denominator, and merges in the k own keys, which are one product per query each: keys are
never concatenated nor repeated for grouped heads, and no mask of M x R is made. `dense` (CPU) goes by documents.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.overrides import handle_torch_function, has_torch_function

BLOCK = 128
"""Queries and keys of one block of the mask: what flex_attention's kernels are tuned for."""


@dataclass
class Sight:
    """Which keys of step 0 each query sees: those of its own document up to its own index."""

    documents: list[tuple[int, int]]
    """Start and end of each document in the row."""
    at_M: Tensor | None = None
    """Indices of the row that ask, ascending; several times the same one at most at the end. None: all."""
    blocks: BlockMask | None = None
    """The same as a mask of blocks, for `flex`; None: `dense`."""

    def select(self, values_R: Tensor) -> Tensor:
        """Of a value for each index of the row (first dimension) those of the queries."""
        return values_R if self.at_M is None else values_R.index_select(0, self.at_M)


def starts_of(documents: list[tuple[int, int]], length: int) -> Tensor:
    """Where the document of each index begins [R], int32; an index of padding is a document of its own."""
    starts_R = torch.arange(length, dtype=torch.int32)
    for start, end in documents:
        starts_R[start:end] = start
    return starts_R


def block_mask(starts_R: Tensor, at_M: Tensor) -> BlockMask:
    """The mask of blocks, made without a mask of M x R: both indices and starts ascend, so that what a block of queries
    sees is one range of key blocks, and what all of them see wholly is one, too.

    The mask's shapes depend on M and R only.
    """
    columns = -(-len(starts_R) // BLOCK)
    first_B = at_M[::BLOCK, None].to(torch.int32)
    last_B = torch.cat([at_M[BLOCK - 1 :: BLOCK], at_M[-1:]])[: len(first_B), None].to(torch.int32)
    lowest_B, highest_B = starts_R[first_B], starts_R[last_B]  # where the first and last query's documents begin
    key_C = torch.arange(columns, device=at_M.device, dtype=torch.int32) * BLOCK
    seen = (key_C + BLOCK > lowest_B) & (key_C <= last_B)
    whole = (key_C >= highest_B) & (key_C + BLOCK - 1 <= first_B)
    begins_M = starts_R[at_M]

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= at_M[query]) & (key >= begins_M[query])

    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~whole), *_ordered(whole), BLOCK, visible, (len(at_M), len(starts_R))
    )


def _ordered(wanted_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row how many columns are wanted, and the columns, wanted ones first; with batch and head dimensions."""
    counts_B = wanted_BC.sum(-1, dtype=torch.int32)
    columns_BC = wanted_BC.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts_B[None, None], columns_BC[None, None].contiguous()


def attend(query_NME: Tensor, keys: list[Tensor], values: list[Tensor], sight: Sight) -> Tensor:
    """Mixed values [N, M, E]. keys[0] and values[0] are step 0's [K, R, E], the others each query's own [K, M, E]."""
    if sight.blocks is None:
        return _dense(query_NME, keys, values, sight)
    mixed_NME, log_sum_NM = causal(query_NME, keys[0], values[0], sight.blocks)
    return _merged(mixed_NME, log_sum_NM, query_NME, keys[1:], values[1:])


def causal(query_NME: Tensor, key_KRE: Tensor, value_KRE: Tensor, blocks: BlockMask) -> tuple[Tensor, Tensor]:
    """Mixed values [N, M, E] of the causal part and the logarithm of its softmax's denominator [N, M], float32."""
    tensors = query_NME, key_KRE, value_KRE
    if has_torch_function(tensors):  # the forecast counts what the GPU's kernel takes
        return handle_torch_function(causal, tensors, *tensors, blocks)
    result: Any = flex_attention(
        query_NME[None],
        key_KRE[None],
        value_KRE[None],
        block_mask=blocks,
        enable_gqa=query_NME.shape[0] != key_KRE.shape[0],
        return_aux=AuxRequest(lse=True),
    )
    mixed_1NME, more = result
    return mixed_1NME[0], more.lse[0]


def _merged(
    mixed_NME: Tensor, log_sum_NM: Tensor, query_NME: Tensor, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """Put the queries' own keys into a softmax that is finished without them (online softmax; exact), in float32."""
    if not keys:
        return mixed_NME
    _, queries, width = query_NME.shape
    grouped = (keys[0].shape[0], -1, queries, width)  # [K, N / K, M, E]: a key head is broadcast over its group
    query = query_NME.view(grouped).float()
    scores = [(query * key_KME[:, None].float()).sum(-1) * width**-0.5 for key_KME in keys]
    causal = log_sum_NM.view(grouped[:-1])
    highest = torch.stack([causal, *scores]).amax(0).detach()
    weight = (causal - highest).exp()
    total, mixed = weight, weight[..., None] * mixed_NME.view(grouped).float()
    for score, value_KME in zip(scores, values, strict=True):
        weight = (score - highest).exp()
        total = total + weight
        mixed = mixed + weight[..., None] * value_KME[:, None].float()
    return (mixed / total[..., None]).to(mixed_NME.dtype).flatten(0, 1)


def _dense(query_NME: Tensor, keys: list[Tensor], values: list[Tensor], sight: Sight) -> Tensor:
    """Document by document, with a mask: memory of the square of a document's length."""
    groups = query_NME.shape[0] // keys[0].shape[0]
    pieces, done = [], 0
    for start, end, begin, until in _ranges(sight, query_NME.shape[1]):
        query = query_NME[:, begin:until]
        key, value = (
            torch.cat([of[0][:, start:end], *(own[:, begin:until] for own in of[1:])], 1).repeat_interleave(groups, 0)
            for of in (keys, values)
        )
        at = torch.arange(begin, until, device=query.device) if sight.at_M is None else sight.at_M[begin:until]
        causal = torch.arange(start, end, device=query.device) <= at[:, None]
        own = torch.eye(until - begin, dtype=torch.bool, device=query.device)
        mask = torch.cat([causal, *[own] * (len(keys) - 1)], dim=1)
        pieces += [
            query.new_zeros(query.shape[0], begin - done, query.shape[2]),
            F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask)[0],
        ]
        done = until
    rest = query_NME.new_zeros(query_NME.shape[0], query_NME.shape[1] - done, query_NME.shape[2])
    return torch.cat([*pieces, rest], dim=1)


def _ranges(sight: Sight, queries: int) -> list[tuple[int, int, int, int]]:
    """Of each document that asks: start and end in the row, and begin and end of its queries among the M."""
    if sight.at_M is None:
        return [(start, end, start, end) for start, end in sight.documents]
    borders = torch.tensor(sight.documents, device=sight.at_M.device).reshape(-1, 2)
    found: Any = torch.searchsorted(sight.at_M, borders).tolist()
    return [
        (start, end, begin, until)
        for (start, end), (begin, until) in zip(sight.documents, found, strict=True)
        if begin < until
    ]
