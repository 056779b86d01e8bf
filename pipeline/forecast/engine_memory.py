"""Memory of one GPU while vLLM runs the target: for prepare.regenerate and for extract.

Weights, keys and values are exact but for vLLM's rounding to blocks. Activations are what the largest layer holds at
once, by the shapes in config.json: an estimate that no run has been compared with yet.
"""

from dataclasses import dataclass

from pipeline.config import Run
from pipeline.forecast.weights import TargetWeights, stored_bytes
from pipeline.preflight.inputs import STATES_PER_TOKEN
from pipeline.target import Target

GIB = 1 << 30
RESIDUALS = 6
"""Tensors as wide as the hidden state that a layer has at once: the residual, its sum, norms, inputs and outputs."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the GPU that holds most (the first one: it keeps the captured states)."""

    weights: float
    activations: int
    captured: int
    overhead: float
    cache_per_token: int
    """Keys and values of one token."""
    cache_tokens: int
    """Tokens whose keys and values are wanted at once."""
    limit: float
    """What the engine may take, target.gpu_memory_utilization of the GPU."""

    @property
    def cache(self) -> int:
        """Keys and values of all wanted tokens."""
        return self.cache_per_token * self.cache_tokens

    @property
    def total(self) -> float:
        """What is needed."""
        return self.weights + self.activations + self.captured + self.overhead + self.cache

    @property
    def room_tokens(self) -> int:
        """Tokens whose keys and values find room beside the rest; below 0 where the rest has none itself."""
        return int((self.limit - self.total + self.cache) // self.cache_per_token)


def engine_memory(
    config: Run, target: Target, weights: TargetWeights, *, batched_tokens: int, cache_tokens: int, captures: bool
) -> EngineMemory:
    """For forward passes of so many tokens, and keys and values of so many at once."""
    gpus, item = config.target.tensor_parallel_size, target.dtype.itemsize
    forecast = config.forecast
    quantised = target.config.get("quantization_config")
    converted = 1 if quantised else item / stored_bytes(target)  # vLLM loads them in target.dtype
    states = STATES_PER_TOKEN * batched_tokens * target.hidden_size * item if captures else 0
    return EngineMemory(
        weights=weights.per_gpu(gpus) * converted,
        activations=batched_tokens * _activations(target, gpus) * item,
        captured=states,
        overhead=forecast.gpu_overhead_gib * GIB,
        cache_per_token=_cache_numbers(target, gpus) * item,
        cache_tokens=cache_tokens,
        limit=config.target.gpu_memory_utilization * forecast.gpu_memory_gib * GIB,
    )


def _cache_numbers(target: Target, gpus: int) -> int:
    """Numbers that one GPU keeps of a token. Latent attention keeps its latent vector, whole on every GPU."""
    own, heads = target.config, int(target.number("num_attention_heads"))
    if own.get("kv_lora_rank") is not None:
        return target.num_layers * (int(target.number("kv_lora_rank")) + int(target.number("qk_rope_head_dim")))
    kv_heads, width = (
        int(own.get("num_key_value_heads") or heads),
        int(own.get("head_dim") or target.hidden_size // heads),
    )
    return target.num_layers * 2 * max(1, kv_heads // gpus) * width


def _activations(target: Target, gpus: int) -> int:
    """Numbers of a token in the widest part of a layer: attention, or the feed-forward part."""
    own, hidden, heads = target.config, target.hidden_size, int(target.number("num_attention_heads"))
    if own.get("kv_lora_rank") is not None:
        query = int(target.number("qk_nope_head_dim")) + int(target.number("qk_rope_head_dim"))
        attention = heads * (2 * query + 2 * int(target.number("v_head_dim")))
    else:
        attention = 4 * heads * int(own.get("head_dim") or hidden // heads)
    feed_forward = 3 * int(target.number("intermediate_size")) // gpus
    if target.num_experts:  # vLLM's fused experts: inner widths, and the output of each chosen expert
        inner = 2 * int(target.number("moe_intermediate_size")) // gpus
        feed_forward = max(feed_forward, int(target.number("num_experts_per_tok")) * (max(inner, hidden) + inner))
    return RESIDUALS * hidden + max(attention // gpus, feed_forward)
