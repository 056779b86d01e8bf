"""The EAGLE-3 draft (Li et al. 2025, arXiv:2503.01840) as vLLM's `llama_eagle3` serves it.

Shapes: R tokens of a row, H hidden, V target vocabulary, D draft vocabulary, N heads, K key/value heads, E head width.

At index p the draft sees the target's three aux states of position p and the embedding of token p+1. Its
output before the final norm is what the next step (k = 1, 2, ...) takes in place of the aux states,
together with token p+1+k. A step's query attends to the keys that step 0 made at 0..p of its document
and to its own keys of steps 1..k, which is what the key/value cache holds when vLLM drafts from p.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pipeline.config import TrainSection
from pipeline.errors import ConfigError
from pipeline.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""The name under which vLLM (0.16 and later) looks up an EAGLE-3 draft of Llama layers."""
LATENT_ATTENTION_HEAD_DIM = 128
"""Head width for targets with latent attention, which have none to inherit; public Kimi drafts use it."""

YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
"""What transformers, vLLM 0.16 and later ones read alike in a yarn."""


def draft_config(target: Target, section: TrainSection, aux_layers: list[int], draft_vocab_size: int) -> LlamaConfig:
    """The draft's configuration: what the section leaves open comes from the target, rope and eps always do.

    Raises ConfigError for heads that do not divide, InputError for a target that does not say its sizes.
    """
    own: dict[str, Any] = target.config
    ends: dict[str, Any] = {name: own.get(name) for name in ("bos_token_id", "eos_token_id")}
    heads = section.num_attention_heads or int(target.number("num_attention_heads"))
    latent = own.get("kv_lora_rank") is not None
    inherited_kv = heads if latent else int(own.get("num_key_value_heads") or heads)
    kv_heads = section.num_key_value_heads or inherited_kv
    inherited_width = LATENT_ATTENTION_HEAD_DIM if latent else own.get("head_dim") or target.hidden_size // heads
    if heads % kv_heads:
        raise ConfigError(f"train: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return LlamaConfig(
        architectures=[ARCHITECTURE],
        hidden_size=target.hidden_size,
        intermediate_size=section.intermediate_size or int(target.number("intermediate_size")),
        num_hidden_layers=section.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=section.head_dim or int(inherited_width),
        rms_norm_eps=float(target.number("rms_norm_eps")),
        rope_theta=float(own.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(own.get("rope_scaling")),
        max_position_embeddings=int(own.get("max_position_embeddings", 2048)),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        norm_before_residual=section.norm_before_residual,
        eagle_aux_hidden_state_layer_ids=list(aux_layers),
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(aux_layers)},
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        **ends,
        dtype=target.section.dtype,
    )


def _rope_scaling(own: dict[str, Any] | None) -> dict[str, Any] | None:
    """The target's rope scaling, as far as all that read the draft understand it alike.

    Kimi's and DeepSeek's yarn has mscale and mscale_all_dim: transformers and vLLM 0.32 then turn unscaled vectors,
    vLLM 0.16 turns vectors that are 0.1 ln(factor) + 1 times as long whatever they say (yarn_scaling_rope.py). A
    draft trained in one way and served in the other loses, and nothing tells. Without the two keys all do the latter,
    which is also what those targets' attention comes to (their softmax has that factor, squared).
    """
    if not own or own.get("rope_type", own.get("type")) != "yarn":
        return own
    return {"rope_type": "yarn"} | {key: own[key] for key in YARN_KEYS if key in own}


@dataclass
class Chain:
    """What the steps of one row share: keys and values so far, rotations, document borders."""

    hidden_RH: Tensor
    documents: list[tuple[int, int]]
    """Start and end of each document in the row."""
    positions_R: Tensor
    step: int = 0
    keys: list[list[Tensor]] = field(default_factory=list)
    """keys[layer][step], each [N, R, E] after rotation; values alike."""
    values: list[list[Tensor]] = field(default_factory=list)


class Attention(nn.Module):
    """Grouped-query attention over step 0's causal keys and the diagonal of each later step."""

    def __init__(self, config: LlamaConfig, input_size: int):
        super().__init__()
        self.head_dim = int(config.head_dim)
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, heads, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)
        self.groups = config.num_attention_heads // config.num_key_value_heads

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def forward(self, x_RH: Tensor, chain: Chain, layer: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query, key = self._heads(self.q_proj(x_RH)), self._heads(self.k_proj(x_RH))
        query_1NRE, key_1KRE = apply_rotary_pos_emb(query[None], key[None], *rotation)
        chain.keys[layer].append(key_1KRE[0].repeat_interleave(self.groups, 0))
        chain.values[layer].append(self._heads(self.v_proj(x_RH)).repeat_interleave(self.groups, 0))
        query_NRE = query_1NRE[0].to(chain.values[layer][-1].dtype)
        mixed_NRE = torch.cat([self._document(query_NRE, chain, layer, *d) for d in chain.documents], dim=1)
        padding = x_RH.shape[0] - mixed_NRE.shape[1]  # rows are padded at their end
        mixed_NRE = F.pad(mixed_NRE, (0, 0, 0, padding))
        return self.o_proj(mixed_NRE.transpose(0, 1).flatten(1))

    @staticmethod
    def _document(query_NRE: Tensor, chain: Chain, layer: int, start: int, end: int) -> Tensor:
        query = query_NRE[:, start:end]
        key = torch.cat([k[:, start:end] for k in chain.keys[layer]], dim=1).to(query.dtype)
        value = torch.cat([v[:, start:end] for v in chain.values[layer]], dim=1).to(query.dtype)
        size = end - start
        causal = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
        own = torch.eye(size, dtype=torch.bool, device=query.device)
        mask = torch.cat([causal, *[own] * chain.step], dim=1)
        return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask)[0]


class Layer(nn.Module):
    """A Llama layer; the first one also takes the token's embedding and normalises both inputs apart."""

    def __init__(self, config: LlamaConfig, index: int):
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.index = index
        self.norm_before_residual = bool(config.norm_before_residual)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        if index == 0:
            self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(config, 2 * hidden if index == 0 else hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )

    def forward(self, embedded_RH: Tensor, hidden_RH: Tensor, chain: Chain, rotation: tuple[Tensor, Tensor]) -> Tensor:
        residual_RH = hidden_RH
        if self.index == 0:
            normed_RH = self.hidden_norm(hidden_RH)
            residual_RH = normed_RH if self.norm_before_residual else hidden_RH
            attended = torch.cat([self.input_layernorm(embedded_RH), normed_RH], dim=-1)
        else:
            attended = self.input_layernorm(hidden_RH)
        residual_RH = residual_RH + self.self_attn(attended, chain, self.index, rotation).float()
        x_RH = self.post_attention_layernorm(residual_RH)
        gated = F.silu(self.mlp["gate_proj"](x_RH)) * self.mlp["up_proj"](x_RH)
        return residual_RH + self.mlp["down_proj"](gated).float()


class Draft(nn.Module):
    """The trainable draft. Weights are float32; the embedding is the target's and frozen.

    Residual stream and norms stay float32; matrix products run in whatever autocast says.
    """

    embedding_VH: Tensor

    def __init__(self, config: LlamaConfig, embedding_VH: Tensor):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, int(config.draft_vocab_size), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("embedding_VH", embedding_VH, persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int, norm_H: Tensor, lm_head_DH: Tensor) -> None:
        """Seeded weights: matrices normal(0, 0.02) as Llama's, norms one, final norm and output rows the target's."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name != "lm_head.weight":
                parameter.normal_(0.0, 0.02, generator=generator)
        self.norm.weight.copy_(norm_H)
        self.lm_head.weight.copy_(lm_head_DH)

    def begin(self, aux_RLH: Tensor, positions_R: Tensor, documents: Iterable[tuple[int, int]]) -> Chain:
        """Start a row from the target's aux states [R, 3, H]; `documents` are the (start, end) of its samples."""
        layers = len(self.layers)
        hidden_RH = self.fc(aux_RLH.flatten(1)).float()
        return Chain(
            hidden_RH, list(documents), positions_R, 0, [[] for _ in range(layers)], [[] for _ in range(layers)]
        )

    def advance(self, chain: Chain, tokens_R: Tensor) -> Tensor:
        """One step with the tokens of p+1+k. Returns the states before the final norm [R, H], float32."""
        embedded_RH = F.embedding(tokens_R, self.embedding_VH).float()
        rotation = self.rotary(embedded_RH, (chain.positions_R + chain.step)[None])
        hidden_RH = chain.hidden_RH
        for layer in self.layers:
            hidden_RH = layer(embedded_RH, hidden_RH, chain, rotation)
        chain.hidden_RH = hidden_RH
        chain.step += 1
        return hidden_RH

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Draft logits [M, D] of states before the final norm, float32."""
        return self.lm_head(self.norm(hidden_MH)).float()

    def weights(self) -> dict[str, Tensor]:
        """The weights under the names that vLLM loads."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


def config_from_folder(values: dict[str, Any]) -> LlamaConfig:
    """A draft's configuration as read from its config.json."""
    return LlamaConfig(
        **{key: value for key, value in values.items() if key not in ("model_type", "transformers_version")}
    )
