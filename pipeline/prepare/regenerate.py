"""The target answers each conversation's last turn anew: a draft must predict the target's own words.

Prompts go to vLLM as token ids and the sampled ids are kept as they come; nothing is tokenised again. An answer ends
with an end-of-turn token, which belongs to it, or at its token limit, without one.

Finished answers go to a journal at once, so that a killed run goes on with what is missing. An answer depends on its
prompt and, when sampled, on a seed made of the run's seed and the sample's id; not on its neighbours or the order. One
caveat: an engine's matrix products may round differently for batches of other sizes. Where two words are equally
likely to the last bits, a run that was interrupted can then choose the other one. In float32 this is rare (none in
our tests), in bfloat16 it is not.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import engine
from pipeline.config import Run
from pipeline.prepare.progress import Progress
from pipeline.prepare.rejects import Rejected
from pipeline.prepare.spool import SpooledPrompt
from pipeline.store.journal import Journal
from pipeline.store.samples import Sample

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

JOURNAL = "answers.journal"
"""Finished answers, in the folder while it is being made."""

BATCHED_TOKENS = 4096
"""Prompt tokens in one forward pass."""

FEED = 2
"""Requests that the engine holds, as a multiple of those that run: enough that none of its places stays empty."""


@dataclass(frozen=True)
class Request:
    """What is to be answered: S prompt tokens, and how long the answer may be."""

    sample_id: str
    prompt_ids_S: np.ndarray
    max_tokens: int

    @property
    def key(self) -> str:
        """Names the answer in the journal. The settings need not be in it: the folder has one set of them."""
        digest = hashlib.blake2b(self.sample_id.encode(), digest_size=16)
        digest.update(self.prompt_ids_S.astype("<i4").tobytes())
        digest.update(str(self.max_tokens).encode())
        return digest.hexdigest()


def seed_of(run_seed: int, sample_id: str) -> int:
    """A seed of 63 bits for one answer, so that it depends on neither order nor batch."""
    digest = hashlib.blake2b(f"{run_seed}\n{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def request_of(prompt: SpooledPrompt, config: Run) -> Request:
    """A prompt as a request, its answer limited by max_new_tokens and by the room that is left."""
    room = config.target.max_length - len(prompt.input_ids_S)
    assert room > 0, "prompts without room are rejected before they are spooled"
    return Request(prompt.sample_id, prompt.input_ids_S, min(config.prepare.max_new_tokens, room))


def answered(prompt: SpooledPrompt, answer_ids: list[int], end_ids: list[int]) -> Sample:
    """Prompt and answer as one sample. Raises Rejected for an answer without a word."""
    if not answer_ids or (len(answer_ids) == 1 and answer_ids[0] in end_ids):
        raise Rejected("empty_answer", "the target ended its turn without a word")
    ids = np.concatenate([prompt.input_ids_S, np.asarray(answer_ids, dtype=np.int32)])
    mask = np.zeros(len(ids), dtype=bool)
    mask[len(prompt.input_ids_S) :] = True
    return Sample(prompt.sample_id, prompt.sample_id, ids, mask)


def answer_all(requests: Iterable[Request], count: int, config: Run, end_ids: list[int], journal: Journal) -> float:
    """Put the answers that are missing into the journal. Returns generated tokens per second, 0 if none was.

    The engine is started only if something is missing, and is gone when this returns.
    """
    missing = (request for request in requests if request.key not in journal)
    first = next(missing, None)
    if first is None:
        return 0.0
    llm = engine.start(
        config, "prepare", max_num_seqs=config.prepare.max_num_seqs, max_num_batched_tokens=BATCHED_TOKENS
    )
    try:
        with Progress("prepare", count, len(journal), config.prepare.max_num_seqs) as progress:
            for key, ids in _generate(llm, _chain(first, missing), config, end_ids):
                journal.append(key, ids)
                progress.add(len(ids))
            return progress.tokens_per_s
    finally:
        llm.llm_engine.engine_core.shutdown()


def _generate(
    llm: "LLM", requests: Iterator[Request], config: Run, end_ids: list[int]
) -> Iterator[tuple[str, list[int]]]:
    """(key, sampled ids) as answers finish.

    `LLM.generate` would want all prompts in memory and return no answer before the last one; with parts of them its
    batch runs empty at the end of each part. So the engine under it is fed one request for each that finishes.
    """
    from vllm import RequestOutput

    running = llm.llm_engine
    room = FEED * config.prepare.max_num_seqs
    held = 0
    while True:
        while held < room and (request := next(requests, None)) is not None:
            prompt: Any = {"prompt_token_ids": request.prompt_ids_S.tolist()}
            running.add_request(request.key, prompt, _sampling(config, request, end_ids))
            held += 1
        if not held:
            return
        for output in running.step():
            assert isinstance(output, RequestOutput)
            if output.finished:
                held -= 1
                answer = output.outputs[0]
                assert answer.finish_reason in ("stop", "length"), f"request ended with {answer.finish_reason}"
                yield output.request_id, [int(token) for token in answer.token_ids]


def _sampling(config: Run, request: Request, end_ids: list[int]) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    section = config.prepare
    return SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        seed=seed_of(config.seed, request.sample_id) if section.temperature else None,
        max_tokens=request.max_tokens,
        stop_token_ids=end_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _chain(first: Request, rest: Iterator[Request]) -> Iterator[Request]:
    yield first
    yield from rest
