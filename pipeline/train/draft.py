"""The EAGLE-3 draft (Li et al. 2025, arXiv:2503.01840) as vLLM's `llama_eagle3` serves it.

Shapes: R tokens of a row, H hidden, V target vocabulary, D draft vocabulary, N heads, K key/value heads, E head width.

At index p the draft sees the target's three aux states of position p and the embedding of token p+1. Its
output before the final norm is what the next step (k = 1, 2, ...) takes in place of the aux states,
together with token p+1+k. A step's query attends to the keys that step 0 made at 0..p of its document
and to its own keys of steps 1..k, which is what the key/value cache holds when vLLM drafts from p.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pipeline.config import TrainSection
from pipeline.errors import ConfigError
from pipeline.target import Target
from pipeline.train.attention import BLOCK, Sight, attend

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


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of each index's position, [R, E] each, float32."""


@dataclass
class Chain:
    """What the steps of one row share: states so far, keys and values, what each query sees."""

    hidden_MH: Tensor
    """States before the final norm of the last step; before step 0 of the whole row [R, H]."""
    sight: Sight
    keys: list[list[Tensor]]
    """keys[layer][step] after rotation: [K, R, E] of step 0, [K, M, E] of later ones; values alike."""
    values: list[list[Tensor]]
    positions_R: Tensor
    step: int = 0


class Attention(nn.Module):
    """Grouped-query attention over step 0's causal keys and the own key of each later step."""

    def __init__(self, config: LlamaConfig, input_size: int):
        super().__init__()
        self.head_dim = int(config.head_dim)
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, heads, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)

    def _heads(self, projected: Tensor, rotation: Rotation | None = None) -> Tensor:
        """[heads, rows, E], turned by `rotation` in float32."""
        split = projected.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        return split if rotation is None else turned(split, rotation)

    def forward(
        self, x_RH: Tensor, keys: list[Tensor], values: list[Tensor], sight: Sight, rotation: Rotation
    ) -> Tensor:
        """Mixed values [M, H] of the queries that `sight` names; x holds all rows that make keys."""
        keys.append(self._heads(self.k_proj(x_RH), rotation))
        values.append(self._heads(self.v_proj(x_RH)))
        asking = sight.select if len(keys) == 1 else _all
        query_NME = self._heads(self.q_proj(asking(x_RH)), (asking(rotation[0]), asking(rotation[1])))
        mixed_NME = attend(query_NME, keys, values, sight)
        return self.o_proj(mixed_NME.transpose(0, 1).flatten(1))


def _all(values_M: Tensor) -> Tensor:
    return values_M


def turned(x_NRE: Tensor, rotation: Rotation) -> Tensor:
    """Rotary positions, computed in float32 and given back in x's dtype."""
    first, second = x_NRE.float().chunk(2, dim=-1)
    cos_RE, sin_RE = rotation
    return (torch.cat([first, second], -1) * cos_RE + torch.cat([-second, first], -1) * sin_RE).to(x_NRE.dtype)


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

    def forward(self, embedded_RH: Tensor, hidden_RH: Tensor, chain: Chain, sight: Sight, rotation: Rotation) -> Tensor:
        """States [M, H] of the queries that `sight` names; embedded and hidden hold all rows that make keys."""
        residual_RH = hidden_RH
        if self.index == 0:
            normed_RH = self.hidden_norm(hidden_RH)
            residual_RH = normed_RH if self.norm_before_residual else hidden_RH
            attended = torch.cat([self.input_layernorm(embedded_RH), normed_RH], dim=-1)
        else:
            attended = self.input_layernorm(hidden_RH)
        residual_MH = sight.select(residual_RH) if chain.step == 0 else residual_RH
        keys, values = chain.keys[self.index], chain.values[self.index]
        residual_MH = residual_MH + self.self_attn(attended, keys, values, sight, rotation).float()
        x_MH = self.post_attention_layernorm(residual_MH)
        gated = F.silu(self.mlp["gate_proj"](x_MH)) * self.mlp["up_proj"](x_MH)
        return residual_MH + self.mlp["down_proj"](gated).float()


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
        self.flex, self.asking_multiple = False, BLOCK
        """Whether `forward` runs attention as `flex` (see pipeline.train.attention); the number of indices that ask is
        then padded to a multiple of the other."""

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
        return self._begin(aux_RLH, positions_R, Sight(list(documents)))

    def advance(self, chain: Chain, tokens_R: Tensor) -> Tensor:
        """One step with the tokens of p+1+k. Returns the states before the final norm [R, H], float32."""
        return self._advance(chain, tokens_R, self.rotation(chain.positions_R + chain.step), chain.sight)

    def forward(
        self,
        aux_RLH: Tensor,
        tokens_R: Tensor,
        rotation: Rotation,
        tokens_KM: Tensor,
        rotation_KM: Rotation,
        sights: tuple[Sight, Sight],
    ) -> Tensor:
        """Final-normed states [K, M, H] of all K steps at the M indices that ask.

        tokens_R, rotation: what step 0 takes at each index of the row. tokens_KM, rotation_KM: the same of every step
        at the indices that ask. sights: of the whole row, which layers before the last one need in step 0, and of those
        that ask. Nothing here depends on data, so that it compiles to one graph.
        """
        whole, asking = sights
        chain = self._begin(aux_RLH, tokens_R, asking)
        made = []
        for step, tokens_M in enumerate(tokens_KM):
            if step == 0:
                made.append(self._advance(chain, tokens_R, rotation, whole))
            else:
                rotation_M = rotation_KM[0][step], rotation_KM[1][step]
                made.append(self._advance(chain, tokens_M, rotation_M, asking))
        return torch.stack([self.norm(hidden_MH).to(_compute_dtype(hidden_MH)) for hidden_MH in made])

    def rotation(self, positions: Tensor) -> Rotation:
        """Of positions of any shape [...]: cosines and sines [..., E], float32."""
        cos_1RE, sin_1RE = self.rotary(self.norm.weight, positions.reshape(1, -1))
        return cos_1RE.view(*positions.shape, -1), sin_1RE.view(*positions.shape, -1)

    def _begin(self, aux_RLH: Tensor, positions_R: Tensor, sight: Sight) -> Chain:
        x_RG = aux_RLH.flatten(1)
        hidden_RH = self.fc(x_RG.to(_compute_dtype(x_RG))).float()
        keys, values = ([[] for _ in self.layers] for _ in range(2))
        return Chain(hidden_RH, sight, keys, values, positions_R)

    def _advance(self, chain: Chain, tokens_R: Tensor, rotation: Rotation, sight: Sight) -> Tensor:
        """One step. `sight` is that of all layers but the last one, whose queries are always the chain's."""
        embedded_RH = F.embedding(tokens_R, self.embedding_VH).float()
        hidden_RH = chain.hidden_MH
        for layer in self.layers:
            last = layer is self.layers[-1]
            hidden_RH = layer(embedded_RH, hidden_RH, chain, chain.sight if last else sight, rotation)
        chain.hidden_MH = hidden_RH
        chain.step += 1
        return hidden_RH

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Draft logits [M, D] of states before the final norm, float32."""
        return self.lm_head(self.norm(hidden_MH)).float()

    def weights(self) -> dict[str, Tensor]:
        """The weights under the names that vLLM loads."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What matrix products run in: autocast's dtype, float32 without it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


def config_from_folder(values: dict[str, Any]) -> LlamaConfig:
    """A draft's configuration as read from its config.json."""
    return LlamaConfig(
        **{key: value for key, value in values.items() if key not in ("model_type", "transformers_version")}
    )
