"""Tiny random models for the tests, and what Hugging Face computes with them.

Weights are drawn wide, so that every layer changes the states by far more than the tests' tolerance: with the usual
0.02 a layer id shifted by one would hardly show.

S tokens, H hidden, V vocabulary
"""

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
    """Five layers: latent attention with yarn, two dense layers, then three with experts, two of four at a time."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
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
    draw_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Random weights, wide ones: see above."""
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


class Reference:
    """Hugging Face's states of each prompt, run alone in float32, by hooks: `output_hidden_states` norms its last."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._modules = [*self._model.model.layers, self._model.model.norm]
        self._known: dict[tuple[int, ...], tuple[dict[int, torch.Tensor], float]] = {}
        self._seen: dict[int, torch.Tensor] = {}
        for layer, module in enumerate(self._modules):
            module.register_forward_pre_hook(self._keep(layer), with_kwargs=True)
        self._gaps: list[float] = []
        for name, module in self._model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._keep_gap)
            if name.endswith("_a_layernorm"):  # transformers leaves DeepSeek's latent norms at 1e-6; vLLM obeys
                module.variance_epsilon = self._model.config.rms_norm_eps

    @property
    def num_layers(self) -> int:
        return len(self._modules) - 1

    def states(self, prompt: list[int]) -> dict[int, torch.Tensor]:
        """Layer id -> [S, H]. Id i is what enters decoder layer i, the number of layers what enters the final norm."""
        return self._run(prompt)[0]

    def is_decisive(self, prompt: list[int]) -> bool:
        """Whether every choice of experts is clear: at a tie, rounding decides, and then other experts answer."""
        return self._run(prompt)[1] > 1e-5

    def _run(self, prompt: list[int]) -> tuple[dict[int, torch.Tensor], float]:
        key = tuple(prompt)
        if key not in self._known:
            self._gaps.clear()
            with torch.no_grad():
                self._model.model(torch.tensor([prompt]), use_cache=False)
            self._known[key] = dict(self._seen), min(self._gaps, default=1.0)
        return self._known[key]

    def _keep_gap(self, gate, args, _output) -> None:
        """The smallest distance between the last expert chosen and the first one not chosen."""
        logits_SE = args[0].reshape(-1, args[0].shape[-1]) @ gate.weight.T
        scores_SE = (logits_SE.sigmoid() + gate.e_score_correction_bias).sort(descending=True).values
        self._gaps.append(float((scores_SE[:, gate.top_k - 1] - scores_SE[:, gate.top_k]).min()))

    def _keep(self, layer: int):
        def hook(_module, args, kwargs):
            self._seen[layer] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook


def max_relative_error(got_SH: torch.Tensor, want_SH: torch.Tensor) -> float:
    """Largest difference in a row, as a share of the row's largest value; the worst row counts."""
    difference_S = (got_SH - want_SH).abs().amax(-1)
    return float((difference_S / want_SH.abs().amax(-1)).max())
