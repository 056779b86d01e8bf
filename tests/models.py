"""Tiny random models for the tests, and what Hugging Face computes with them.

Weights are drawn wide, so that every layer changes the states by far more than the tests' tolerance: with the usual
0.02 a layer id shifted by one would hardly show.

S tokens, H hidden, V vocabulary
"""

import json
from pathlib import Path

import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320
"""More rows than the tokenizer has words (256 bytes and three markers), as in many real models."""
MAX_POSITIONS = 2304


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges, ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_tiny_llama(folder: Path) -> Path:
    """Eight layers, grouped key/value heads, untied output rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=50000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        eos_token_id=258,
        bos_token_id=None,
        pad_token_id=256,
    )
    return _save(LlamaForCausalLM, config, folder)


def save_tiny_deepseek(folder: Path) -> Path:
    """Six layers: latent attention with yarn, a dense first layer, then experts of which two of eight answer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=50000.0,
        rope_scaling={
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": MAX_POSITIONS // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        eos_token_id=258,
        bos_token_id=None,
        pad_token_id=256,
    )
    return _save(DeepseekV3ForCausalLM, config, folder)


def _save(model_class, config, folder: Path) -> Path:
    torch.manual_seed(0)
    model = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms: all ones would hide a missing one
                parameter.uniform_(0.5, 1.5)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.05)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def reference_states(folder: Path, prompts: list[list[int]]) -> list[dict[int, torch.Tensor]]:
    """For each prompt, run alone in float32: layer id -> [S, H]. Id i is what enters decoder layer i, the number of
    layers what enters the final norm. Recorded by hooks: `output_hidden_states` norms its last entry."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int):
        def hook(_module, args, kwargs):
            seen[layer] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook

    for layer, module in enumerate([*model.model.layers, model.model.norm]):
        module.register_forward_pre_hook(keep(layer), with_kwargs=True)
    states = []
    for prompt in prompts:
        with torch.no_grad():
            model.model(torch.tensor([prompt]), use_cache=False)
        states.append(dict(seen))
        seen.clear()
    return states


def max_relative_error(got_SH: torch.Tensor, want_SH: torch.Tensor) -> float:
    """Largest difference in a row, as a share of the row's largest value; the worst row counts."""
    difference_S = (got_SH - want_SH).abs().amax(-1)
    return float((difference_S / want_SH.abs().amax(-1)).max())


def num_layers(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["num_hidden_layers"]
