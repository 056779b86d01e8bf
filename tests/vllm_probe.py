"""What the vLLM of an environment does where patches/vllm changes it. Prints one JSON object.

PYTHON tests/vllm_probe.py
"""

import json
from types import SimpleNamespace
from typing import Any


def draft_reads_from() -> list[str]:
    """Classes that vLLM takes for targets of EAGLE-3 drafts; the last is none."""
    from vllm.model_executor.models import deepseek_mtp, deepseek_v2, kimi_k25
    from vllm.model_executor.models.interfaces import supports_eagle3

    classes: list[Any] = [
        deepseek_v2.DeepseekV2ForCausalLM,
        deepseek_v2.DeepseekV3ForCausalLM,
        kimi_k25.KimiK25ForConditionalGeneration,
        deepseek_mtp.DeepSeekMTP,
    ]
    return [model.__name__ for model in classes if supports_eagle3(model)]


def accepted_targets() -> list[str]:
    """Model types of targets that SpeculativeConfig lets pass."""
    from vllm.config.speculative import SpeculativeConfig

    passed = []
    for model_type in ("llama", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "mamba"):
        config = object.__new__(SpeculativeConfig)
        target = SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type))
        for name, value in {"method": "eagle3", "num_speculative_tokens": 3, "target_model_config": target}.items():
            object.__setattr__(config, name, value)
        for name in ("tensor_parallel_size", "draft_model_config", "disable_by_batch_size"):
            object.__setattr__(config, name, None)
        try:
            SpeculativeConfig._verify_args(config)
            passed.append(model_type)
        except ValueError as error:
            if "Eagle3 is only supported for" not in str(error):
                raise
    return passed


def distinct_graph_keys() -> int:
    """Keys of compiled graphs for drafts that read [1, 2, 3], [1, 2, 4], and what the model says."""
    from vllm.config.speculative import SpeculativeConfig

    keys = set()
    for layers in ({"eagle_aux_hidden_state_layer_ids": ids} for ids in ([1, 2, 3], [1, 2, 4], None)):
        config = object.__new__(SpeculativeConfig)
        draft = SimpleNamespace(hf_config=SimpleNamespace(**layers))
        for name, value in {"method": "eagle3", "draft_model_config": draft}.items():
            object.__setattr__(config, name, value)
        keys.add(config.compute_hash())
    return len(keys)


def media_token_of_the_draft() -> int | str:
    """What a draft's configuration gets when it is loaded for a Kimi-K2.5 whose media token is 77."""
    from vllm.v1.spec_decode import eagle

    eagle.get_layers_from_vllm_config = lambda *_: {}
    target = type("KimiK25ForConditionalGeneration", (), {"supports_multimodal": True})()
    target.config = SimpleNamespace(media_placeholder_token_id=77)
    target.get_language_model = lambda: target
    draft = SimpleNamespace(config=SimpleNamespace())
    proposer = object.__new__(eagle.SpecDecodeBaseProposer)
    proposer.vllm_config, proposer.supports_mm_inputs, proposer.parallel_drafting = None, False, False  # pyright: ignore
    proposer._get_model = lambda: draft  # pyright: ignore[reportAttributeAccessIssue]
    proposer._maybe_share_embeddings = proposer._maybe_share_lm_head = lambda _: None
    try:
        proposer.load_model(target)  # pyright: ignore[reportArgumentType]
    except AttributeError as error:
        return str(error)
    return draft.config.image_token_index


def remote_code(allowed: bool) -> list[bool]:
    """What the classes say on a user's behalf: Kimi-K2.5's image processor, Nemotron-VL's vision tower."""
    from vllm.model_executor.models import kimi_k25, nemotron_vl

    said: list[bool] = []

    def note(*_: Any, trust_remote_code: bool) -> Any:
        said.append(trust_remote_code)
        return SimpleNamespace(media_tokens_calculator=None)

    kimi_k25.cached_get_image_processor = note
    kimi_k25.MoonshotKimiVAutoProcessor = lambda **_: None  # pyright: ignore[reportAttributeAccessIssue]
    model_config = SimpleNamespace(model="model", trust_remote_code=allowed)
    hf_config = SimpleNamespace(media_placeholder_token_id=77)
    context = SimpleNamespace(model_config=model_config, get_hf_config=lambda *_: hf_config, tokenizer=None)
    info = object.__new__(kimi_k25.KimiK25ProcessingInfo)
    info.get_tokenizer = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    info.__init__(context)  # pyright: ignore[reportArgumentType]

    nemotron_vl.AutoModel = SimpleNamespace(from_config=note)  # pyright: ignore[reportAttributeAccessIssue]
    tower = nemotron_vl.LlamaNemotronVLChatModel._init_vision_model
    tower(SimpleNamespace(trust_remote_code=allowed), SimpleNamespace(vision_config=None), None, prefix="")  # pyright: ignore
    return said


if __name__ == "__main__":
    found = {
        "draft_reads_from": draft_reads_from(),
        "accepted_targets": accepted_targets(),
        "distinct_graph_keys": distinct_graph_keys(),
        "media_token_of_the_draft": media_token_of_the_draft(),
        "remote_code_refused": remote_code(False),
        "remote_code_allowed": remote_code(True),
    }
    print(json.dumps(found))
