"""Models of random weights, prompts, and the run that the step `extract` is given.

A model is a config.json alone: vLLM draws its weights ("dummy": uniform, +-0.001, the same ones every time). They take
as much time as real ones. States are finite and different from token to token, but such layers hardly change them, so
a file system that compresses would do better with them than with real ones: measure on one that does not.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import Run, load
from pipeline.store import finish
from pipeline.store.samples import Sample, write_samples

SEED = 20261130
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
"""meta-llama/Llama-3.1-8B's shapes: 8.03 billion parameters, 16 GB in bfloat16; 32,768 bytes of states a token."""
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
"""Kimi-K2.5's layers, fewer of them (8 of 61) and with fewer experts (64 of 384): 23.6 billion parameters, 47 GB in
bfloat16, so that it fits one GPU; Kimi's 57,344 bytes of states a token. It does less for each token than Kimi does, so
its states come faster, which makes the target harder."""
TINY: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
"""For a CPU: shows that the benchmark works, and nothing else."""
END = "<end>"
MODELS = {"llama-8b": LLAMA_8B, "deepseek": DEEPSEEK, "tiny": TINY}


@dataclass(frozen=True)
class Setting:
    """What all phases share: a model by name, `prompts` of `tokens` tokens each, and the run's limits."""

    model: str
    prompts: int
    tokens: int
    batched_tokens: int
    shard_tokens: int
    writers: int
    tensor_parallel: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Of the states alone: three aux layers and the last one."""
        return 4 * MODELS[self.model]["hidden_size"] * {"bfloat16": 2, "float32": 4}[self.dtype]

    @property
    def states_bytes(self) -> int:
        return self.prompts * self.tokens * self.bytes_per_token


def count_parameters(config: dict[str, Any]) -> int:
    """Weights of a model by its config.json, embedding and output rows included."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    total = 2 * vocab * hidden + hidden + layers * 2 * hidden  # embedding and output rows, norms
    heads = config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        attention = 2 * hidden * config["head_dim"] * (heads + config["num_key_value_heads"])
        return total + layers * (attention + 3 * hidden * config["intermediate_size"])
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    attention = hidden * q_rank + q_rank + q_rank * heads * (nope + rope)
    attention += hidden * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value) + heads * value * hidden
    dense, experts = config["first_k_dense_replace"], config["n_routed_experts"]
    total += layers * attention + dense * 3 * hidden * config["intermediate_size"]
    moe = (experts + config["n_shared_experts"]) * 3 * hidden * config["moe_intermediate_size"]
    return total + (layers - dense) * (moe + experts * hidden + experts)  # the router, and its bias


def write_model(folder: Path, name: str) -> None:
    """A model's folder: config.json, and a tokenizer of 256 bytes and an end: speculators loads one, and asks
    it for the end only."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name], indent=1) + "\n")
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[])).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about) + "\n")


def make_prompts(setting: Setting) -> list[list[int]]:
    """The same random token ids for every phase."""
    random = np.random.default_rng(SEED)
    return random.integers(0, MODELS[setting.model]["vocab_size"], (setting.prompts, setting.tokens)).tolist()


def write_run(place: Path, model_folder: Path, setting: Setting) -> Run:
    """A run in `place` that is ready for `extract`: run.toml, and prepared/ with the prompts, all of it supervised."""
    value = json.dumps  # a string of JSON is one of TOML as well
    text = f"""\
name = "bench"
runs_dir = {value(str(place))}
[target]
path = {value(str(model_folder))}
load_format = "dummy"
dtype = {value(setting.dtype)}
tensor_parallel_size = {setting.tensor_parallel}
max_length = {setting.tokens}
[prepare]
sources = ["random token ids"]
[extract]
engine = "stream"
max_batched_tokens = {setting.batched_tokens}
max_num_seqs = {-(-setting.batched_tokens // setting.tokens) + 1}
shard_tokens = {setting.shard_tokens}
writers = {setting.writers}
progress_json = {value(str(place / "progress.jsonl"))}
[train]
tokens_per_row = {setting.tokens}
"""
    (place / "run.toml").write_text(text)
    config = load(place / "run.toml")
    samples = [
        Sample(f"sample-{number:06d}", f"sample-{number:06d}", np.array(ids, np.int32), np.ones(len(ids), np.bool_))
        for number, ids in enumerate(make_prompts(setting))
    ]
    shard = write_samples(config.folder("prepared") / "samples-00000.parquet", samples)
    finish(config.folder("prepared"), "prepare", {"seed": SEED}, [shard], {"samples": len(samples)})
    return config
