"""speculators 0.3.0 as released, with only what it needs to run on vLLM 0.16: what our speed is compared with.

It is made from the installed, patched package: all other patches are taken back, in reverse order, in a copy.
"""

import shutil
from pathlib import Path

from pipeline import engine, patching
from pipeline.errors import InputError

BREAKS = {
    "tokenizer-trust-remote-code.patch": "its AutoTokenizer call cannot load Kimi's",
    "scheduler-config-is-encoder-decoder.patch": "SchedulerConfig requires is_encoder_decoder",
    "capture-without-reaching-into-the-model.patch": "the worker calls methods that vLLM has renamed",
    "kv-cache-config-without-specs.patch": "get_kv_cache_config_from_groups takes no kv_cache_specs",
    "scheduler-block-size.patch": "Scheduler requires block_size",
    "request-eos-token-id-on-both-builds.patch": "Request(eos_token_id=) is required in one build, gone in the other",
    "execute-model-in-two-phases.patch": "execute_model must be followed by sample_tokens",
    "reply-of-one-rank-is-not-a-list.patch": "collective_rpc's reply of one rank is not a list",
    "prefix-caching-off.patch": "prefix caching is on by default and asserts a block hasher",
    "spawn-workers.patch": "CUDA cannot be initialised again in a forked worker",
}
"""The API breaks: without any one of these patches extraction stops. The first patches of the series, so that those
after them can be taken back exactly."""
FOR_THE_BENCHMARK = {
    "engine-arguments.patch": "random weights (load_format) and the other phases' limits; generate() is not touched",
}
FOR_A_CPU = {
    "kv-cache-memory-from-the-workers.patch": "a machine without CUDA has no torch.cuda.mem_get_info",
}


def kept_patches() -> set[str]:
    """File names of the patches that stay in, on this machine."""
    return {*BREAKS, *FOR_THE_BENCHMARK, *(FOR_A_CPU if engine.on_cpu() else ())}


def make_variant(folder: Path, keep: set[str]) -> Path:
    """A copy of the installed speculators in `folder`, with those patches only; to be put first on sys.path.

    Raises InputError where speculators is not installed with our patches, GNU patch is missing, or a patch cannot be
    taken back exactly.
    """
    try:
        patching.run("verify", "speculators")
        installed = patching.Installed("speculators")
        patches = patching.load_patch_set("speculators").choose(installed.version).patches
        if unknown := keep - {patch.name for patch in patches}:
            raise InputError(f"bench: patches/speculators has no {min(unknown)}: bring benchmarks/stock.py up to date")
        source = installed.root / "speculators"
        shutil.copytree(source, folder / "speculators", ignore=shutil.ignore_patterns("__pycache__"))
        for patch in reversed(patches):
            if patch.name not in keep:
                patching.run_patch(folder, patch.path, "--reverse")
    except patching.PatchingError as error:
        raise InputError(f"bench: speculators without our patches cannot be made: {error}") from None
    return folder
