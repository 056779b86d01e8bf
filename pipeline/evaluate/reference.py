"""Engine `reference`: exact chain verification with the target in transformers, on any machine.

The target writes its answer first, alone. Verification accepts a draft token exactly when it is the one
that the target wrote next, and a later draft token counts only when all earlier ones were accepted, hence
equal to the answer. So every draft that vLLM could make along this answer can be computed at once: step k
at index p is fed the answer's token p+1+k and compared with token p+2+k. Then the walk: p starts at the
last prompt token and moves on by the accepted tokens plus one. This holds for sampled answers too, since
vLLM's draft proposes its most likely token: speculative sampling accepts it with the target's
probability of it, which is the chance that the target's own sample equals it.

Accepted tokens past the end of an answer count, as they do in vLLM; so the target writes on that far.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from pipeline.errors import InputError
from pipeline.evaluate.counts import Counts, Outcome, Question
from pipeline.target import Target
from pipeline.train.draft import Draft, config_from_folder
from pipeline.train.loss import shifted

PROMPTS_AT_ONCE = 16


def load_draft(folder: Path, embedding_VH: Tensor) -> tuple[Draft, Tensor]:
    """A draft from its checkpoint, and the target ids of its words [D]. Raises InputError for an unfit folder."""
    try:
        config = config_from_folder(json.loads((folder / "config.json").read_text()))
        tensors = load_file(folder / "model.safetensors")
        words = int(config.draft_vocab_size)
        d2t_D = tensors.pop("d2t", torch.zeros(words, dtype=torch.long))
        tensors.pop("t2d", None)
        draft = Draft(config, embedding_VH)
        draft.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"evaluate: {folder} is not a draft that can be read ({error})") from None
    return draft.eval(), d2t_D + torch.arange(words)


class ReferenceEngine:
    """The target in transformers and the draft from its checkpoint, in the target's dtype and float32."""

    def __init__(self, target: Target, draft_folder: Path):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        draft, kept_D = load_draft(draft_folder, target.head().embedding_VH)
        self.draft, self.kept_D = draft.to(self.device), kept_D.to(self.device)
        self.aux_layers: list[int] = self.draft.config.eagle_aux_hidden_state_layer_ids
        self.num_layers = target.num_layers
        self.model = _load_text_model(target).to(self.device).eval()

    @torch.no_grad()
    def answer(self, question: Question) -> Outcome:
        """Decode every prompt and count. Takes memory for PROMPTS_AT_ONCE prompts."""
        order = sorted(range(len(question.prompts)), key=lambda i: len(question.prompts[i]))
        found: dict[int, tuple[Counts, list[int]]] = {}
        with tqdm(total=len(order), desc="evaluate", unit="prompt") as bar:
            for first in range(0, len(order), PROMPTS_AT_ONCE):
                chosen = order[first : first + PROMPTS_AT_ONCE]
                prompts = [question.prompts[i] for i in chosen]
                for i, prompt, written in zip(chosen, prompts, self._write(prompts, question), strict=True):
                    hits_KS = self._hits(prompt + written, question.num_speculative_tokens)
                    found[i] = walk(hits_KS, prompt, written, question)
                    bar.update()
        counts, answers = zip(*(found[i] for i in range(len(order))), strict=True)
        return Outcome(list(counts), list(answers))

    def _write(self, prompts: list[list[int]], question: Question) -> list[list[int]]:
        """The target's own answers, each written on past its end by what verification may look at."""
        longest = max(map(len, prompts))
        padding = next(i for i in range(len(prompts) + 1) if all(i != prompt[-1] for prompt in prompts))
        ids = torch.tensor([[padding] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        beyond = question.num_speculative_tokens + 1
        torch.manual_seed(question.seed)
        sampling = {"do_sample": True, "temperature": question.temperature, "top_k": 0, "top_p": 1.0}
        written = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=question.max_new_tokens + beyond,
            eos_token_id=None,
            pad_token_id=padding,
            stopping_criteria=[_ended_before(longest, set(question.stop_ids), beyond)],
            **(sampling if question.temperature > 0 else {"do_sample": False}),
        )
        return written[:, longest:].tolist()

    def _hits(self, ids: list[int], steps: int) -> Tensor:
        """hits[k, p]: the draft's step k at index p proposes token p+2+k of `ids` (False past the end)."""
        tokens_S = torch.tensor(ids, device=self.device)
        states = self.model(input_ids=tokens_S[None], output_hidden_states=True, use_cache=False).hidden_states
        assert self.num_layers not in self.aux_layers, "transformers' last state is normed already"
        aux_SLH = torch.stack([states[layer][0] for layer in self.aux_layers], dim=1).float()
        chain = self.draft.begin(aux_SLH, torch.arange(len(ids), device=self.device), [(0, len(ids))])
        hits = []
        for step in range(steps):
            hidden_SH = self.draft.advance(chain, shifted(tokens_S, step + 1))
            proposed_S = self.kept_D[self.draft.logits(hidden_SH).argmax(-1)]
            hits.append(proposed_S == shifted(tokens_S, step + 2, -1))
        return torch.stack(hits).cpu()


def _load_text_model(target: Target) -> Any:
    """The target in transformers; out of a wrapper its text model.

    Raises InputError for a wrapper with quantised weights, which are not read here.
    """
    from transformers import AutoModelForCausalLM

    if target.family.prefix:
        model = _unwrapped(target)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            target.folder, dtype=target.dtype, trust_remote_code=target.trust_remote_code
        )
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):  # transformers leaves the norms of latent vectors at 1e-6; vLLM obeys
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def _unwrapped(target: Target) -> Any:
    """By transformers' own code and none of the model's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {key: value for key, value in target.config.items() if key != "model_type"}
    if own.get("quantization_config"):
        raise InputError(
            f"evaluate: the weights of {target.folder} are quantised, engine reference does not read them. "
            'Set evaluate.engine = "vllm"'
        )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(target.family.text_type, **own), dtype=target.dtype)
    names, prefix = list(model.state_dict()), target.family.prefix
    tensors = target.tensors([prefix + name for name in names])
    model.load_state_dict({name: tensors[prefix + name] for name in names})
    return model


def walk(hits_KS: Tensor, prompt: list[int], written: list[int], question: Question) -> tuple[Counts, list[int]]:
    """Verify along an answer: counts, and the answer up to its end (stop token included)."""
    stops = [i + 1 for i, token in enumerate(written) if token in question.stop_ids]
    length = min([question.max_new_tokens, *stops[:1]])
    accepted = [0] * question.num_speculative_tokens
    produced, drafts = 1, 0
    while produced < length:
        hits = hits_KS[:, len(prompt) - 2 + produced].tolist()
        run = next((k for k, hit in enumerate(hits) if not hit), len(hits))
        for k in range(run):
            accepted[k] += 1
        drafts += 1
        produced += run + 1
    return Counts(drafts, accepted, length), written[:length]


def _ended_before(prompt_length: int, stop_ids: set[int], beyond: int) -> Any:
    """Stop a sequence once it has `beyond` tokens after its first stop token."""
    from transformers import StoppingCriteria

    class EndedBefore(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            stop = torch.isin(input_ids[:, prompt_length:], torch.tensor(sorted(stop_ids), device=input_ids.device))
            return stop.int().cumsum(1).bool().sum(1) > beyond

    return EndedBefore()
