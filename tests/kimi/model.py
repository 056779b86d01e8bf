"""A small Kimi-K2.5 with random weights: Kimi's architecture, wrapper, weight names, shards and attention sizes.

Source of the names and of all that is not a size: moonshotai/Kimi-K2.5, config.json and model.safetensors.index.json.
The text model is transformers' DeepSeek-V3, which gives the reference for its states.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.target import _hash_code
from tests.kimi.tokenizer import BOS, VOCAB_SIZE, save_kimi_tokenizer
from tests.models import draw_weights

HIDDEN, NUM_LAYERS = 128, 8
AUX_LAYERS = [2, 4, 5]
"""vLLM's default for eight layers: 2, the middle, the last but two."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,  # these four are Kimi's own sizes: GPUs have kernels for them, and for few others
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": BOS + 1,
    "pad_token_id": BOS + 255,
}
VISION: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "merge_kernel_size": [2, 2],
    "video_attn_type": "spatial_temporal",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 32,
    "text_hidden_size": HIDDEN,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}
HEAD = ("language_model.lm_head.", "language_model.model.embed_tokens.", "language_model.model.norm.")
"""What lies in the last shard but two, as in the released model: all that turns states into words."""


def save_small_kimi(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The wrapper and its tokenizer; shards of a layer each, the head in one of its own, then the vision tower."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    text = DeepseekV3ForCausalLM(DeepseekV3Config(**TEXT))
    torch.manual_seed(0)
    draw_weights(text)
    tensors = {f"language_model.{name}": tensor for name, tensor in text.state_dict().items()}
    tensors |= _vision_weights()
    write_shards(folder, {name: tensor.to(_stored(name, dtype)).contiguous() for name, tensor in tensors.items()})
    write_config(folder, str(dtype).removeprefix("torch."))
    save_kimi_tokenizer(folder)
    _save_image_processor(folder)
    return folder


def save_text_model(kimi: Path, folder: Path) -> Path:
    """The text model of a small Kimi as a DeepSeek-V3 that transformers loads: the reference for its states."""
    from safetensors.torch import load_file

    prefix = "language_model."
    tensors = {name: tensor for shard in kimi.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    folder.mkdir(parents=True, exist_ok=True)
    text = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    save_file(text, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((kimi / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    return folder


def pinned(folder: Path) -> dict[str, Any]:
    """What `[target]` says of a small Kimi: its tokenizer is code, so that is allowed and pinned."""
    return {"path": str(folder), "trust_remote_code": True, "code_sha256": _hash_code(folder)}


def write_config(folder: Path, dtype: str, **text: Any) -> None:
    """config.json; `text` adds to the text model's part."""
    inner = TEXT | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "torch_dtype": dtype}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "torch_dtype": dtype,
        "bos_token_id": BOS,
        "eos_token_id": BOS + 1,
        "pad_token_id": BOS + 255,
        "media_placeholder_token_id": BOS + 21,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": inner | text,
        "vision_config": VISION,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One shard a text layer, one for the head, one for the vision tower; and their index."""
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer = name.removeprefix("language_model.model.layers.").split(".")[0]
        place = f"{int(layer):03d}" if layer.isdigit() else "head" if name.startswith(HEAD) else "vision"
        shards.setdefault(place, {})[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number, place in enumerate(sorted(shards), 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shards[place], folder / file, {"format": "pt"})
        index |= dict.fromkeys(shards[place], file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def _stored(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def _vision_weights() -> dict[str, torch.Tensor]:
    hidden, inner, patch, merged = 32, 64, VISION["patch_size"], 4 * 32
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (hidden,),
        "vision_tower.patch_embed.pos_emb.weight": (4, 4, hidden),
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
        "vision_tower.encoder.final_layernorm.bias": (hidden,),
        "mm_projector.pre_norm.weight": (hidden,),
        "mm_projector.pre_norm.bias": (hidden,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (HIDDEN, merged),
        "mm_projector.proj.2.bias": (HIDDEN,),
    }
    block = "vision_tower.encoder.blocks.0."
    for name, shape in {
        "norm0": (hidden,),
        "norm1": (hidden,),
        "wqkv": (3 * hidden, hidden),
        "wo": (hidden, hidden),
        "mlp.fc0": (inner, hidden),
        "mlp.fc1": (hidden, inner),
    }.items():
        shapes |= {f"{block}{name}.weight": shape, f"{block}{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def _save_image_processor(folder: Path) -> None:
    """Kimi's image processor is code that comes with the model; vLLM loads it even where only text is asked for."""
    source = Path(__file__).with_name("kimi_k25_vision_processing.py")
    (folder / source.name).write_bytes(source.read_bytes())
    processor = "KimiK25VisionProcessor"
    limits = ("in_patch_limit", "patch_limit_on_one_side", "in_patch_limit_each_frame", "in_patch_limit_video")
    media: dict[str, Any] = dict.fromkeys(limits, 64) | {
        "patch_size": VISION["patch_size"],
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "fixed_output_tokens": None,
    }
    config = {
        "auto_map": {"AutoImageProcessor": f"{source.stem}.{processor}"},
        "image_processor_type": processor,
        "media_proc_cfg": media,  # vLLM's own processor reads it, since 0.20
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(config, indent=1))
