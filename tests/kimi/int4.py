"""A small Kimi-K2.5 as it is released: routed experts in int4 (compressed-tensors, pack-quantized, groups of 32), all
else in bfloat16. Source of the layout: moonshotai/Kimi-K2.5, config.json, `text_config.quantization_config`."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.kimi.model import write_config, write_shards

GROUP = 32
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
                "observer": "minmax",
                "actorder": None,
                "block_structure": None,
            },
        }
    },
}


def save_int4_kimi(kimi: Path, folder: Path, same_in_bfloat16: Path) -> None:
    """Quantise a small Kimi into `folder`; into `same_in_bfloat16` goes what its int4 weights stand for."""
    tensors = {name: tensor for shard in kimi.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    packed: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            parts, value = quantise(tensor)
            packed |= {name.removesuffix("weight") + part: content for part, content in parts.items()}
            meant[name] = value
        else:
            meant[name] = packed[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
    for place, content, more in (
        (folder, packed, {"quantization_config": QUANTIZATION}),
        (same_in_bfloat16, meant, {}),
    ):
        shutil.copytree(kimi, place, ignore=shutil.ignore_patterns("model*"))
        write_shards(place, content)
        write_config(place, "bfloat16", **more)


def quantise(weight_OI: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Packed form of a weight [out, in], and its value in bfloat16: integers from -8 to 7 times a scale for each 32."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32

    grouped = weight_OI.float().unflatten(1, (-1, GROUP))
    scale = (grouped.abs().amax(-1, keepdim=True) / 7).bfloat16()
    whole = (grouped / scale.float()).round().clamp(-8, 7)
    parts = {
        "weight_packed": pack_to_int32(whole.flatten(1).to(torch.int8), 4),
        "weight_scale": scale[..., 0].contiguous(),
        "weight_shape": torch.tensor(weight_OI.shape, dtype=torch.int64),
    }
    return parts, (whole.bfloat16() * scale).flatten(1)
