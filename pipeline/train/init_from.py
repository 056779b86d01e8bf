"""Fine-tuning: begin with the weights of a draft that is there already, ours or a public one (`train.init_from`).

A folder with config.json and weights, as vLLM serves an EAGLE-3 draft of Llama layers. Three forms are known: ours,
SpecForge's and the EAGLE authors' (the layer is called `midlayer`), and speculators' (the sizes lie in
`transformer_layer_config`). What its configuration says is compared with what this run would make: a draft that was
trained on other layers' states, or with another rope, loads without a complaint and is worth little.

D words of this run's draft, E of the other's, V of the target
"""

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig

from pipeline.errors import ConfigError, InputError
from pipeline.store import file_sha256
from pipeline.train.draft import Draft

INDEX, SINGLE, OLD = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"
IGNORED = ("rotary_emb.", "verifier_", "embed_tokens.", "t2d", "d2t")
"""Beginnings of names that are not weights of the draft; the embedding and the words are compared by themselves."""
SIZES = {  # key: where it is set, and what it is where the file does not say
    "hidden_size": ("", None),
    "vocab_size": ("", None),
    "num_hidden_layers": ("train.num_layers", 1),
    "intermediate_size": ("train.intermediate_size", None),
    "num_attention_heads": ("train.num_attention_heads", None),
    "num_key_value_heads": ("train.num_key_value_heads", None),
    "head_dim": ("train.head_dim", None),
    "attention_bias": ("", False),
    "mlp_bias": ("", False),
    "hidden_act": ("", "silu"),
}
"""In which a draft must be the same to be loaded at all."""
YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
"""Of transformers' yarn, where nothing is said."""


@dataclass(frozen=True)
class Found:
    """A draft in a folder."""

    folder: Path
    config: dict[str, Any]
    """One level, under Llama's names."""
    tensors: dict[str, Tensor]
    """Under the names of pipeline.train.draft; `d2t` and `embed_tokens.weight` where it has them."""


def begin_from(
    draft: Draft, folder: Path, kept_D: Tensor, default_aux_layers: list[int], unequal: Literal["stop", "warn"]
) -> list[str]:
    """Load the weights of the draft in `folder` into `draft`, which has been initialised. Returns what to say of it.

    `kept_D` are this run's words; output rows of words that the other draft cannot say stay as they are.
    `default_aux_layers` are those that vLLM takes where the configuration names none. Raises ConfigError with a line
    for each difference in what the draft is (with `warn`, only for those of sizes), InputError for files that are
    missing, torn, or not a draft of this form.
    """
    found = read(folder)
    try:
        refused, differing = differences(found, draft, default_aux_layers)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise InputError(f"train: {folder / 'config.json'} is not an EAGLE-3 draft's configuration ({error})") from None
    if refused or (differing and unequal == "stop"):
        advice = "" if refused else '\ntrain: train.init_from_unequal = "warn" trains it all the same'
        raise ConfigError("\n".join(refused + differing) + advice)
    weights = dict(found.tensors)
    rows_ED = weights.pop("lm_head.weight", None)
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith(IGNORED)}
    own = dict(draft.named_parameters())
    wanted = own.keys() - {"lm_head.weight"}
    if missing := sorted(wanted - weights.keys()):
        raise InputError(f"train: init_from {folder} has no {missing[0]}{_more(missing)}: not a whole EAGLE-3 draft")
    if unknown := sorted(weights.keys() - wanted):
        raise InputError(
            f"train: init_from {folder} has {unknown[0]}{_more(unknown)}, which this draft has no place for"
        )
    if rows_ED is None:
        raise InputError(f"train: init_from {folder} has no lm_head.weight: not a whole EAGLE-3 draft")
    for name, tensor in weights.items():
        _fill(own[name], tensor, f"{folder} has {name}")
    taken = _fill_rows(own["lm_head.weight"], rows_ED, _words(found, len(rows_ED)), kept_D, folder)
    words = f"{taken:,} of {len(kept_D):,} words' output rows"
    left = "" if taken == len(kept_D) else ", the others start as the target's"
    return [*differing, f"train  begins from {folder}: {words}{left}"]


def read(folder: Path) -> Found:
    """Read a draft. Raises InputError, naming the file, for one that is missing, torn, or no configuration."""
    config_file = _config_file(folder)
    try:
        config = json.loads(config_file.read_text())
        values = {**config, **(config.get("transformer_layer_config") or {})}
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"train: {config_file} is not a configuration ({error})") from None
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors.update((_our_name(name), tensor) for name, tensor in _tensors(file))
    return Found(folder, values, tensors)


def _config_file(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise InputError(f"train: init_from {folder} has no config.json. It is to be a draft's folder on this machine")
    return folder / "config.json"


def weight_files(folder: Path) -> list[Path]:
    """The files of its weights. Raises InputError for one that the index names and that is not there."""
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(f"train: {folder / INDEX} is not an index of weights ({error})") from None
        for name in names:
            if not (folder / name).is_file():
                raise InputError(f"train: {folder / name} is missing: {INDEX} names it")
        return [folder / name for name in names]
    for name in (SINGLE, OLD):
        if (folder / name).is_file():
            return [folder / name]
    raise InputError(f"train: init_from {folder} has no weights: neither {SINGLE}, {INDEX} nor {OLD}")


def fingerprint(folder: Path) -> str:
    """Of configuration and weights: a run that began from other ones is another run."""
    return " ".join(file_sha256(file)[:16] for file in [_config_file(folder), *weight_files(folder)])


def differences(found: Found, draft: Draft, default_aux_layers: list[int]) -> tuple[list[str], list[str]]:
    """Lines for sizes that do not fit, and for all else in which the draft is not what this run makes."""
    theirs, ours = found.config, draft.config
    refused = [
        _line(found, key, theirs.get(key, default), getattr(ours, key), setting)
        for key, (setting, default) in SIZES.items()
        if _size_of(theirs, key, default) != getattr(ours, key)
    ]
    aux = (theirs.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    aux = theirs.get("eagle_aux_hidden_state_layer_ids") or aux or default_aux_layers
    rope = theirs.get("rope_parameters") or {}
    meant = [  # vLLM's own values where nothing is said: it would serve the draft with them
        ("aux layers", list(aux), list(ours.eagle_aux_hidden_state_layer_ids), "extract.aux_layers"),
        (
            "norm_before_residual",
            bool(theirs.get("norm_before_residual", False)),
            bool(ours.norm_before_residual),
            "train.norm_before_residual",
        ),
        ("rms_norm_eps", float(theirs.get("rms_norm_eps", 1e-6)), float(ours.rms_norm_eps), ""),
        ("rope_theta", float(rope.get("rope_theta", theirs.get("rope_theta", 10000.0))), _theta(ours), ""),
        ("rope_scaling", _scaling(rope or theirs.get("rope_scaling")), _own_scaling(ours), ""),
    ]
    differing = [_line(found, *each) for each in meant if each[1] != each[2]]
    embedding = found.tensors.get("embed_tokens.weight")
    if embedding is not None and not _is_targets(embedding, draft.embedding_VH):
        differing.append(f"train: init_from {found.folder} has an embedding of its own; this run keeps the target's")
    return refused, differing


def _size_of(config: dict[str, Any], key: str, default: Any) -> Any:
    if key == "head_dim" and config.get(key) is None:
        return int(config.get("hidden_size", 0)) // int(config.get("num_attention_heads", 1))
    if key == "num_key_value_heads" and config.get(key) is None:
        return config.get("num_attention_heads")
    return config.get(key, default)


def _line(found: Found, what: str, theirs: Any, ours: Any, setting: str) -> str:
    advice = f"set {setting}" if setting else "it comes from the target: the draft is another one's"
    return f"train: init_from {found.folder} has {what} {theirs}, this run makes {ours} ({advice})"


def _scaling(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """A rope scaling in one spelling; None for what scales nothing."""
    if not value:
        return None
    kind = value.get("rope_type", value.get("type", "default"))
    if kind == "default":
        return None
    known = {key: each for key, each in value.items() if key not in ("type", "rope_type", "rope_theta")}
    if kind == "yarn":  # mscale and mscale_all_dim are left out of drafts: see pipeline.train.draft
        known = YARN | {key: each for key, each in known.items() if not key.startswith("mscale")}
    numbers = {key: each if isinstance(each, list | bool) else float(each) for key, each in sorted(known.items())}
    return {"rope_type": kind, **numbers}


def _own_scaling(config: LlamaConfig) -> dict[str, Any] | None:
    return _scaling(getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None))


def _theta(config: LlamaConfig) -> float:
    own: Any = config
    return float(own.rope_theta)


def _is_targets(embedding_VH: Tensor, own_VH: Tensor) -> bool:
    """As far as the coarser of the two types tells."""
    return embedding_VH.shape == own_VH.shape and torch.equal(
        embedding_VH.to(torch.bfloat16), own_VH.to("cpu", torch.bfloat16)
    )


def _words(found: Found, count: int) -> Tensor:
    """Target ids of the other draft's words [E]; without d2t it can say all, and its ids are the target's."""
    d2t = found.tensors.get("d2t")
    words = torch.arange(count) if d2t is None else torch.arange(len(d2t)) + d2t.to(torch.int64)
    vocab = int(found.config.get("vocab_size", 0))
    whole = len(words) == count and len(words.unique()) == count
    if not whole or int(words.min()) < 0 or int(words.max()) >= vocab:
        raise InputError(
            f"train: init_from {found.folder}: d2t does not name {count:,} different words of {vocab:,}, "
            "one for each row of lm_head.weight"
        )
    return words


@torch.no_grad()
def _fill_rows(rows_DH: Tensor, theirs_EH: Tensor, words_E: Tensor, kept_D: Tensor, folder: Path) -> int:
    """Take over the output rows of words that both have. Returns how many these are."""
    if theirs_EH.shape[1:] != rows_DH.shape[1:]:
        raise InputError(
            f"train: init_from {folder} has lm_head.weight {list(theirs_EH.shape)}: of another hidden size"
        )
    place = {word: number for number, word in enumerate(words_E.tolist())}
    pairs = [(number, place[word]) for number, word in enumerate(kept_D.tolist()) if word in place]
    if pairs:
        here, there = torch.tensor(pairs).unbind(1)
        if not theirs_EH[there].isfinite().all():
            raise InputError(f"train: init_from {folder} has lm_head.weight with numbers that are not finite")
        rows_DH[here.to(rows_DH.device)] = theirs_EH[there].to(rows_DH.device, rows_DH.dtype)
    return len(pairs)


@torch.no_grad()
def _fill(parameter: Tensor, tensor: Tensor, what: str) -> None:
    if parameter.shape != tensor.shape:
        raise InputError(
            f"train: init_from {what} {list(tensor.shape)}, its configuration says {list(parameter.shape)}"
        )
    if not tensor.isfinite().all():
        raise InputError(f"train: init_from {what} with numbers that are not finite")
    parameter.copy_(tensor)


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        if file.name == OLD:
            yield from torch.load(file, map_location="cpu", weights_only=True).items()
            return
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                yield name, opened.get_tensor(name)
    except (
        SafetensorError, OSError, RuntimeError, EOFError, ValueError, AttributeError, pickle.UnpicklingError
    ) as error:  # fmt: skip
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"train: {file} cannot be read ({first}). Is it whole? Fetch it again") from None


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
