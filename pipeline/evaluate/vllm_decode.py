"""Decode with vLLM, with or without a draft, and write down what its counters say.

    PYTHON vllm_decode.py JOB.json RESULT.json

Runs in a process of its own, so that GPU memory is free again afterwards, and under any Python whose vLLM
can decode speculatively: it imports vLLM, what vLLM needs and the standard library only. See
pipeline.evaluate.vllm_engine for what JOB.json holds. Ends with CANNOT_DRAFT, and RESULT.json says what is lacking,
where this vLLM would find out after loading the target that it cannot hand its states to a draft.
"""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

CANNOT_DRAFT = 20
"""Exit code; Python, vLLM and signals use others."""


def lacks(job: dict[str, Any]) -> str | None:
    """What vLLM's class for the target lacks to work with the job's draft; None if nothing, or if vLLM must decide.

    vLLM asks its model once the weights are loaded; the class knows before. A class that is not in vLLM's own list is
    left to vLLM.
    """
    if "speculative_config" not in job["engine"]:
        return None
    import vllm
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    architectures = json.loads(Path(job["engine"]["model"], "config.json").read_text()).get("architectures") or []
    known = [name for name in architectures if name in ModelRegistry.models]
    if not known or supports_eagle3(ModelRegistry.models[known[0]].load_model_cls()):
        return None
    return f"vLLM {vllm.__version__} cannot serve an EAGLE-3 draft for {known[0]}: that class hands out no states"


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Answer the prompts of a job. Returns ids, seconds and vLLM's speculative-decoding counters.

    `counters` has an entry for each prompt where vLLM decodes one at a time, else a single one for all of them.
    """
    import vllm
    from tqdm import tqdm
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    sampling = SamplingParams(
        temperature=job["temperature"],
        seed=job["seed"],
        max_tokens=job["max_new_tokens"],
        stop_token_ids=job["stop_ids"],
        detokenize=False,
    )
    prompts: Any = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    llm.generate(prompts[:1], sampling, use_tqdm=False)  # what is compiled and captured at first use is not timed
    size = 1 if job["engine"]["max_num_seqs"] == 1 else len(prompts)
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    outputs, readings, begun = [], [_counters(llm)], time.perf_counter()
    for group in tqdm(groups, unit="prompt", disable=len(groups) == 1):
        outputs += llm.generate(group, sampling, use_tqdm=len(groups) == 1)
        readings.append(_counters(llm))
    return {
        "vllm": vllm.__version__,
        "seconds": time.perf_counter() - begun,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": [
            {name: _minus(after[name], before[name]) for name in after} for before, after in pairwise(readings)
        ],
    }


def _counters(llm: Any) -> dict[str, Any]:
    wanted = "vllm:spec_decode_"
    return {
        metric.name.removeprefix(wanted): getattr(metric, "value", None) or getattr(metric, "values", 0)
        for metric in llm.get_metrics()
        if metric.name.startswith(wanted)
    }


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after - before


def main() -> None:
    """Read the job, decode, write the result."""
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if reason := lacks(job):
        Path(sys.argv[2]).write_text(json.dumps({"lacks": reason}))
        sys.exit(CANNOT_DRAFT)
    Path(sys.argv[2]).write_text(json.dumps(decode(job)))


if __name__ == "__main__":
    main()
