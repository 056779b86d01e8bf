"""The target model: the only module that knows model families.

Where a family keeps its text configuration, embedding, final norm and output rows is one line of
`FAMILIES`. Weights are read tensor by tensor from the shards that hold them, never whole.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import TargetSection
from pipeline.errors import ConfigError, InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

SAMPLED_BYTES = 1 << 20
"""Of each weight file the first and last so many bytes enter the fingerprint: hashing 594 GB would take an hour."""


@dataclass(frozen=True)
class Family:
    """Names that differ between model families."""

    text_config: str = ""
    """Key of the language model's part in config.json; empty where the file itself is that part."""
    text_type: str = ""
    """transformers' name for the language model inside a wrapper, where config.json may have another one."""
    prefix: str = ""
    """What precedes `model.` and `lm_head.` in the names of the weights."""
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    modalities: tuple[str, ...] = ()
    """What the model takes beside text, by vLLM's names."""
    eagle3_since: tuple[int, int] = (0, 0)
    """The first release of vLLM that hands this family's states to an EAGLE-3 draft. Before it, patches/vllm does."""
    special_ids: dict[str, int] = field(default_factory=dict)
    """Tokens that turns are made of, with their distance from the configuration's bos_token_id. Where the tokenizer
    says otherwise, the masks would be wrong in silence: that is an error."""
    thinking_argument: str = ""
    """What the chat template calls target.thinking; empty where it knows no such thing."""
    reasoning_apart: bool = False
    """Whether the chat template wants reasoning as a field of its own: inside the text of an answer it would be taken
    for the answer (prepare/reasoning.py)."""


LLAMA_LIKE = Family()
QWEN3 = Family(thinking_argument="enable_thinking")
DEEPSEEK = Family(
    eagle3_since=(0, 18),
    thinking_argument="thinking",  # V3.1's template; V3's and R1's do not read it
)
KIMI_K25 = Family(
    text_config="text_config",
    text_type="deepseek_v3",  # the released config.json says kimi_k2, which vLLM knows and transformers does not
    prefix="language_model.",
    modalities=("vision_chunk",),
    eagle3_since=(0, 18),
    special_ids={  # moonshotai/Kimi-K2.5, tokenizer_config.json: [BOS] is 163584; one public table swaps the next two
        "[BOS]": 0,
        "[EOS]": 1,
        "<|im_end|>": 2,
        "<|im_user|>": 3,
        "<|im_assistant|>": 4,
        "<|im_system|>": 10,
        "<|tool_calls_section_begin|>": 11,
        "<|tool_calls_section_end|>": 12,
        "<|tool_call_begin|>": 13,
        "<|tool_call_argument_begin|>": 14,
        "<|tool_call_end|>": 15,
        "<|im_middle|>": 17,
        "<|media_begin|>": 18,
        "<|media_content|>": 19,
        "<|media_end|>": 20,
        "<|media_pad|>": 21,
        "<think>": 22,
        "</think>": 23,
    },
    thinking_argument="thinking",
    reasoning_apart=True,
)
FAMILIES: dict[str, Family] = {
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "kimi_k25": KIMI_K25,
}


@dataclass(frozen=True)
class Head:
    """What turns the target's last hidden state into its words, float32, on the CPU (V words, H hidden).

    logits = lm_head_VH @ (norm_H * x / rms(x)): the final norm is part of it, exactly once.
    """

    embedding_VH: "torch.Tensor"
    norm_H: "torch.Tensor"
    lm_head_VH: "torch.Tensor"
    rms_norm_eps: float


class Target:
    """A target model on disk. Nothing is read before it is asked for.

    Raises InputError for a folder that lacks what is asked: config, tokenizer, template, weights.
    """

    def __init__(self, section: TargetSection):
        self.section = section

    @classmethod
    def at(cls, section: TargetSection, folder: Path) -> "Target":
        """The target of a section whose folder is known already, so that the hub is not asked where it lies."""
        return cls(section.model_copy(update={"path": str(folder)}))

    @cached_property
    def folder(self) -> Path:
        """The local folder; a Hugging Face name is resolved (and downloaded) first."""
        path = Path(self.section.path)
        if path.is_dir():
            return path
        if self.section.gguf and not path.exists():
            raise InputError(f"target: {path} is missing. Run prepare first: it unpacks {self.section.gguf}")
        if not is_hub_name(self.section.path):
            raise InputError(
                f"target: {path} is not a folder. Set target.path to the model's folder or Hugging Face name"
            )
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(self.section.path, revision=self.section.revision))
        except LocalEntryNotFoundError:
            raise InputError(
                f"target: {self.section.path} has not been fetched, and the hub is out of reach here. "
                "Run prepare first, where it can be reached"
            ) from None
        except Exception as error:  # network, login, unknown name: the hub's errors share no base class
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"target: {self.section.path} is no folder and cannot be fetched: {reason}") from error

    def require_pin(self) -> None:
        """Raise ConfigError where code that comes with the model is allowed to run and is not pinned, or is another
        than the one pinned. Fetches nothing."""
        if not self.section.trust_remote_code:
            return
        if Path(self.section.path).is_dir():
            _ = self._whole_config  # a folder without one is no model, and its code none to read
            found, pin = _hash_code(self.folder), self.section.code_sha256
            if pin != found:
                raise ConfigError(
                    f"target: the code in {self.folder} is not {f'the one pinned ({pin})' if pin else 'pinned'}, so it "
                    f'does not run. Read it, then set target.code_sha256 = "{found}"'
                )
        elif is_hub_name(self.section.path) and not re.fullmatch("[0-9a-f]{40}", self.section.revision or ""):
            shown = (
                f"{self.section.revision!r}, {len(self.section.revision)} long" if self.section.revision else "not set"
            )
            raise ConfigError(
                f"target: target.trust_remote_code runs code of {self.section.path}, and target.revision is {shown}: "
                "pin it with the 40 digits of a commit"
            )

    @cached_property
    def trust_remote_code(self) -> bool:
        """Whether code that comes with the model may run: where the configuration says so, and for the code it names.

        Raises what `require_pin` raises, and InputError for a model whose configuration points to code of another
        repository, which no pin of this one holds.
        """
        self.require_pin()
        if not self.section.trust_remote_code:
            return False
        for name in ("config.json", "tokenizer_config.json"):
            value = _read_json(self.folder / name).get("auto_map", {}) if (self.folder / name).is_file() else {}
            if "--" in json.dumps(value):
                raise InputError(f"target: {self.folder / name} takes code from another repository ({value}): refused")
        return True

    @cached_property
    def _whole_config(self) -> dict[str, Any]:
        return _read_json(self.folder / "config.json")

    @property
    def model_type(self) -> str:
        """What config.json says that it is."""
        return self._whole_config.get("model_type", "")

    @cached_property
    def family(self) -> Family:
        """The names of this model's family; a model type that is not in the table is taken to be Llama-like."""
        return FAMILIES.get(self.model_type, LLAMA_LIKE)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The language model's own configuration, as its config.json has it."""
        key = self.family.text_config
        if key and not isinstance(self._whole_config.get(key), dict):
            raise InputError(
                f"target: {self.folder / 'config.json'} has no {key}, where this family keeps its text model"
            )
        return self._whole_config[key] if key else self._whole_config

    def number(self, key: str) -> float:
        """A number that the language model's configuration must have. Raises InputError where it has not."""
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            said = f"{key} {value!r}, not a number" if key in self.config else f"no {key}"
            raise InputError(f"target: {self.folder / 'config.json'} has {said}")
        return value

    @property
    def dtype(self) -> "torch.dtype":
        """The type of weights and captured states, target.dtype."""
        import torch

        return getattr(torch, self.section.dtype)

    @property
    def num_layers(self) -> int:
        return int(self.number("num_hidden_layers"))

    @property
    def num_experts(self) -> int:
        """Experts of a layer that a token chooses among; 0 for a model without. Families have two names for it."""
        return int(self.config.get("n_routed_experts") or self.config.get("num_experts") or 0)

    @property
    def hidden_size(self) -> int:
        return int(self.number("hidden_size"))

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix, which may exceed the tokenizer's words."""
        return int(self.number("vocab_size"))

    @property
    def text_only(self) -> dict[str, int] | None:
        """vLLM's `limit_mm_per_prompt` that leaves out what is not text: a vision tower is then not even loaded."""
        return dict.fromkeys(self.family.modalities, 0) or None

    def aux_layers(self, wanted: tuple[int, int, int] | None) -> list[int]:
        """Three aux layer ids in vLLM's serving convention: id i is the input of decoder layer i.

        The default is the one of vLLM's own models (2, middle, last but two). Raises InputError for ids that vLLM
        cannot serve: it captures at the layers' inputs and adds the residual, which the first layer does not have.
        """
        layers = list(wanted) if wanted else [2, self.num_layers // 2, self.num_layers - 3]
        if not 0 < layers[0] < layers[1] < layers[2] < self.num_layers:
            raise InputError(
                f"extract: aux_layers {layers} do not fit {self.folder}, which has {self.num_layers} layers. "
                f"vLLM serves increasing ids from 1 to {self.num_layers - 1}; set extract.aux_layers"
            )
        return layers

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, with a chat template. Raises InputError when either is missing."""
        from transformers import AutoTokenizer

        self.require_pin()  # before anything is fetched
        _read_json(self.folder / "config.json")
        if not (self.folder / "tokenizer_config.json").is_file():
            raise InputError(f"target: {self.folder} has no tokenizer (tokenizer_config.json)")
        trusted = self.trust_remote_code
        # tiktoken keeps a copy of every file, local ones too, in the temporary folder under the file's *path*: Kimi's
        # ranks of another checkout, or of before a change, would be taken for these. Empty: it keeps none
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", "")
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=trusted, local_files_only=True)
        except Exception as error:  # it may be the model's own code that fails, in whatever way
            if "trust_remote_code" in str(error):
                raise InputError(
                    f"target: the tokenizer of {self.folder} is code that comes with the model. "
                    "Read it, then set target.trust_remote_code, and pin it with target.revision or target.code_sha256"
                ) from error
            raise InputError(f"target: the tokenizer of {self.folder} does not load: {_first_line(error)}") from error
        if not tokenizer.chat_template:
            raise InputError(f"target: the tokenizer of {self.folder} has no chat template")
        self._check_special_ids(tokenizer)
        return tokenizer

    def _check_special_ids(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        for token, distance in self.family.special_ids.items():
            wanted = int(self.number("bos_token_id")) + distance
            ids: Any = tokenizer(token, add_special_tokens=False)["input_ids"]  # as prepare asks it
            if ids != [wanted]:
                said = ids[0] if len(ids) == 1 else f"no token of its own ({len(ids)} ids)"
                raise InputError(
                    f"target: the tokenizer of {self.folder} has {token} as {said}, and not as {wanted}, which is its "
                    "id in this family. Take the tokenizer that came with the model"
                )

    @cached_property
    def end_of_turn_ids(self) -> list[int]:
        """Ids that end the model's answer: those of generation_config.json, config.json and the tokenizer."""
        generation = self.folder / "generation_config.json"
        found: list[int] = []
        for source in (_read_json(generation) if generation.is_file() else {}, self.config):
            value = source.get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        own: Any = self.tokenizer.eos_token_id
        if own is not None:
            found.append(int(own))
        if not found:
            raise InputError(f"target: {self.folder} names no eos_token_id: nothing would end an answer")
        return list(dict.fromkeys(found))

    @cached_property
    def template_arguments(self) -> dict[str, Any]:
        """What the chat template is told beside the messages: target.thinking, by the name that it has there.

        Raises ConfigError where target.thinking is set and the template would not hear of it.
        """
        thinking, argument = self.section.thinking, self.family.thinking_argument
        if thinking is None:
            return {}
        if not argument:
            raise ConfigError(
                f"target: target.thinking is set, and no chat template of model type "
                f"{self._whole_config.get('model_type')!r} is known to read it. Leave it out"
            )
        if not re.search(rf"\b{argument}\b", str(self.tokenizer.chat_template)):
            raise ConfigError(
                f"target: target.thinking is set, and the chat template of {self.folder} does not read "
                f"{argument!r}. Leave it out"
            )
        return {argument: thinking}

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """All added tokens with their ids, special or not (`</think>` and tool markers are often not).

        A slow tokenizer may keep some to itself, so its tokenizer_config.json is asked as well.
        """
        tokens = {str(token): int(i) for i, token in self.tokenizer.added_tokens_decoder.items()}
        if not self.tokenizer.is_fast:
            listed = _read_json(self.folder / "tokenizer_config.json").get("added_tokens_decoder", {})
            tokens |= {token["content"]: int(i) for i, token in listed.items()}
        return tokens

    @cached_property
    def control_texts(self) -> set[str]:
        """All texts that are encoded as one control token: those of `control_tokens`, and what has an id beyond BOS.

        Kimi's tokenizer knows 256 of these, most of them named in no file (`<|reserved_token_163592|>`).
        """
        first = int(self.number("bos_token_id"))
        return {*self.control_tokens, *(text for text, i in self.tokenizer.get_vocab().items() if i >= first)}

    @cached_property
    def control_ids(self) -> list[int]:
        """Ids that a draft must always be able to say: end of turn, thinking and tool markers."""
        return sorted({*self.end_of_turn_ids, *self.control_tokens.values()})

    def head(self) -> Head:
        """Read embedding, final norm and output rows; only the shards that hold them are opened."""
        import torch

        names = [self.family.prefix + name for name in (self.family.embedding, self.family.norm, self.family.lm_head)]
        tied = bool(self.config.get("tie_word_embeddings", False))
        tensors = self.tensors(names[:2] if tied else names)
        embedding, norm = (tensors[name].to(torch.float32) for name in names[:2])
        lm_head = embedding if tied else tensors[names[2]].to(torch.float32)
        expected = (self.vocab_size, self.hidden_size)
        for name, tensor in ((names[0], embedding), (names[2], lm_head)):
            if tuple(tensor.shape) != expected:
                raise InputError(
                    f"target: {name} in {self.folder} is {tuple(tensor.shape)}, config.json says {expected}"
                )
        return Head(embedding, norm, lm_head, float(self.number("rms_norm_eps")))

    def tensors(self, names: list[str]) -> "dict[str, torch.Tensor]":
        """Read tensors by their full names from the safetensors shards."""
        from safetensors import SafetensorError, safe_open

        found: dict[str, torch.Tensor] = {}
        for file, wanted in self._shards_of(names).items():
            try:
                with safe_open(file, framework="pt") as shard:
                    found.update({name: shard.get_tensor(name) for name in wanted})
            except (SafetensorError, OSError) as error:
                raise InputError(f"target: {file} cannot be read: {_first_line(error)}") from None
        return found

    def _shards_of(self, names: list[str]) -> dict[Path, list[str]]:
        index_file, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if not index_file.is_file():
            if not single.is_file():
                raise InputError(f"target: {self.folder} has neither {single.name} nor {index_file.name}")
            return {single: names}
        index = _read_json(index_file).get("weight_map", {})
        if missing := [name for name in names if name not in index]:
            raise InputError(f"target: {index_file} lists no tensor named {missing[0]}")
        shards: dict[Path, list[str]] = {}
        for name in names:
            shards.setdefault(self.folder / index[name], []).append(name)
        return shards

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model's configuration and weights, for run keys (see SAMPLED_BYTES)."""
        if self.section.load_format == "dummy":  # vLLM asks for no files
            return _hash_files([self.folder / "config.json"]) + "-dummy"
        weights = sorted(self.folder.glob("*.safetensors"))
        if not weights:
            raise InputError(f"target: {self.folder} has no weights (*.safetensors)")
        return _hash_files([self.folder / "config.json", *weights])

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Hash of everything but the weights: tokenizer, template, generation settings, remote code."""
        skip = {".safetensors", ".bin", ".pt", ".gguf"}
        return _hash_files(sorted(f for f in self.folder.iterdir() if f.is_file() and f.suffix not in skip))


def is_hub_name(path: str) -> bool:
    """Whether `target.path` is a Hugging Face name, owner/model: no folder, and none in a folder that is there."""
    place = Path(path)
    return not (place.exists() or place.is_absolute() or place.parent.is_dir()) and path.count("/") == 1


def _hash_code(folder: Path) -> str:
    """SHA-256, in hex, over names and contents of all Python files of a model's folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _hash_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        if not path.is_file():
            raise InputError(f"target: {path} is missing")
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size}\n".encode())
            digest.update(file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()[:32]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError:
        raise InputError(f"target: {path} is missing or unreadable") from None
    except ValueError as error:
        raise InputError(f"target: {path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"target: {path} is not a JSON object")
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
