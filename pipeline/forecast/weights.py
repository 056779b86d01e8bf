"""Bytes of the target's weights, on disk and on each of the GPUs that share it.

Computed from config.json: matrices only, norms and biases are below 0.1 %. What the folder or the index of the weights
says of the sum is taken where there is such; what it has beyond the text model (an image encoder) is held whole by
every GPU, like the parts that vLLM 0.16 does not split: the router, and the way down into latent attention.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.forecast.shapes import Shapes
from pipeline.preflight.inputs import weight_bytes, weight_files
from pipeline.target import Target

INDEX = "model.safetensors.index.json"
SCALE_BYTES = 2
"""A scale of quantised weights is a bfloat16 (compressed-tensors, pack-quantized)."""
STORED_BYTES = 2
"""Weights that are not quantised are stored as bfloat16 or float16, unless config.json names float32."""


@dataclass(frozen=True)
class Matrices:
    """Equal matrices: the name of one of them, its shape, how many there are, and whether GPUs share each."""

    name: str
    shape: tuple[int, int]
    count: int
    shared: bool = True


@dataclass(frozen=True)
class TargetWeights:
    """Bytes on disk in all, the part of them that every GPU holds whole, and where the sum comes from."""

    total: int
    whole: int
    source: str

    def per_gpu(self, gpus: int) -> float:
        """Bytes on each of the GPUs that share the target."""
        return self.whole + (self.total - self.whole) / gpus


def target_weights(shapes: Shapes) -> TargetWeights:
    """Size of the weights, as their files, the hub or their index say, or computed."""
    target = shapes.target
    computed = [(_bytes(target, matrices), matrices.shared) for matrices in _matrices(target)]
    size, whole = sum(size for size, _ in computed), sum(size for size, shared in computed if not shared)
    total, source = (shapes.weights_on_hub, "the hub") if shapes.weights_on_hub else _stated(target)
    if not total:
        return TargetWeights(size, whole, "computed from config.json")
    return TargetWeights(total, min(total, whole + max(0, total - size)), source)


def stored_bytes(target: Target) -> int:
    """Bytes of a weight on disk that is not quantised."""
    return 4 if str(target.config.get("dtype") or target.config.get("torch_dtype")) == "float32" else STORED_BYTES


def _stated(target: Target) -> tuple[int, str]:
    index = target.folder / INDEX
    files = weight_files(target.folder) if index.is_file() else ["model.safetensors"]
    if all((target.folder / name).is_file() for name in files):
        return weight_bytes(target.folder), "its files' sizes"
    if not index.is_file():
        return 0, ""
    try:
        return int(json.loads(index.read_bytes())["metadata"]["total_size"]), f"its {INDEX}"
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"forecast: {index} does not say total_size ({error!r}). Fetch it again") from None


def _matrices(target: Target) -> Iterator[Matrices]:
    own, hidden, layers = target.config, target.hidden_size, target.num_layers
    yield Matrices("embed_tokens", (target.vocab_size, hidden), 1)
    if not own.get("tie_word_embeddings", False):
        yield Matrices("lm_head", (target.vocab_size, hidden), 1)
    yield from _attention(target)
    dense = min(layers, int(own.get("first_k_dense_replace") or 0)) if target.num_experts else layers
    yield Matrices("model.layers.0.mlp.up_proj", (hidden, int(target.number("intermediate_size"))), 3 * dense)
    if target.num_experts:
        sparse, width = layers - dense, int(target.number("moe_intermediate_size"))
        name = f"model.layers.{dense}.mlp"
        yield Matrices(f"{name}.experts.0.up_proj", (hidden, width), 3 * sparse * target.num_experts)
        shared = int(own.get("n_shared_experts") or 0)
        yield Matrices(f"{name}.shared_experts.up_proj", (hidden, width), 3 * sparse * shared)
        yield Matrices(f"{name}.gate", (hidden, target.num_experts), sparse, shared=False)


def _attention(target: Target) -> Iterator[Matrices]:
    own, hidden, layers = target.config, target.hidden_size, target.num_layers
    name, heads = "model.layers.0.self_attn", int(target.number("num_attention_heads"))
    if own.get("kv_lora_rank") is None:
        width = int(own.get("head_dim") or hidden // heads)
        for heads_of in (heads, heads, *[int(own.get("num_key_value_heads") or heads)] * 2):
            yield Matrices(f"{name}.q_proj", (hidden, heads_of * width), layers)
        return
    latent, nope, rope, value = (
        int(target.number(key)) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query_from = int(own.get("q_lora_rank") or hidden)
    if own.get("q_lora_rank"):
        yield Matrices(f"{name}.q_a_proj", (hidden, query_from), layers, shared=False)
    yield Matrices(f"{name}.q_b_proj", (query_from, heads * (nope + rope)), layers)
    yield Matrices(f"{name}.kv_a_proj_with_mqa", (hidden, latent + rope), layers, shared=False)
    yield Matrices(f"{name}.kv_b_proj", (latent, heads * (nope + value)), layers)
    yield Matrices(f"{name}.o_proj", (heads * value, hidden), layers)


def _bytes(target: Target, matrices: Matrices) -> int:
    numbers = matrices.count * matrices.shape[0] * matrices.shape[1]
    settings = target.config.get("quantization_config") or {}
    if not settings or matrices.name.startswith(("embed", "lm_head")) or matrices.name.endswith("gate"):
        return numbers * stored_bytes(target)
    try:
        if any(_names(pattern, matrices.name) for pattern in _left_out(settings)):
            return numbers * stored_bytes(target)
        bits, group = _bits_and_group(settings)
    except (AttributeError, TypeError, ValueError, re.error) as error:
        place = target.folder / "config.json"
        raise InputError(f"forecast: quantization_config in {place} is of an unknown form ({error})") from None
    return numbers * bits // 8 + (numbers // group * SCALE_BYTES if group else 0)


def _left_out(settings: dict[str, Any]) -> list[str]:
    """Names and patterns of what is not quantised, as compressed-tensors and transformers keep them."""
    return [*(settings.get("ignore") or []), *(settings.get("modules_to_not_convert") or [])]


def _names(pattern: str, name: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else name.endswith(pattern)


def _bits_and_group(settings: dict[str, Any]) -> tuple[int, int]:
    """Bits of a weight, and how many weights have a scale in common (0: so many that scales do not count)."""
    groups = list((settings.get("config_groups") or {}).values())
    weights = groups[0].get("weights") or {} if groups else settings
    bits = weights.get("num_bits") or weights.get("bits") or 8  # fp8 names no bits
    return int(bits), max(0, int(weights.get("group_size") or 0))
