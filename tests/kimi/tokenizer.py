"""The files of a small Kimi-K2.5's tokenizer: 512 ranks and Kimi's 256 special tokens, in Kimi's order after them.

The order, the marks of the template and what transformers hears of the special tokens are Kimi's; the ranks are made
here, of a text of our own. `tokenization_kimi.py` and `chat_template.jinja` beside this file go into the folder as
they are.
"""

import base64
import json
import shutil
from collections import Counter
from pathlib import Path

BOS = 512
"""Kimi's is 163584; every special token keeps its distance from it."""
VOCAB_SIZE = 768
END_OF_TURN = BOS + 2
"""`<|im_end|>`, which generation_config.json names; [EOS] ends no turn."""

SPECIAL = {
    "[BOS]": BOS,
    "[EOS]": BOS + 1,
    "<|im_end|>": BOS + 2,
    "<|im_user|>": BOS + 3,
    "<|im_assistant|>": BOS + 4,
    "<|start_header_id|>": BOS + 6,
    "<|end_header_id|>": BOS + 7,
    "[EOT]": BOS + 9,
    "<|im_system|>": BOS + 10,
    "<|im_middle|>": BOS + 17,
    "<|media_begin|>": BOS + 18,
    "<|media_content|>": BOS + 19,
    "<|media_end|>": BOS + 20,
    "<|media_pad|>": BOS + 21,
    "[UNK]": BOS + 254,
    "[PAD]": BOS + 255,
}
"""Left out by `skip_special_tokens`."""
NOT_SPECIAL = {
    "<|tool_calls_section_begin|>": BOS + 11,
    "<|tool_calls_section_end|>": BOS + 12,
    "<|tool_call_begin|>": BOS + 13,
    "<|tool_call_argument_begin|>": BOS + 14,
    "<|tool_call_end|>": BOS + 15,
    "<think>": BOS + 22,
    "</think>": BOS + 23,
}
"""Tokens of their own that stay in a text without special tokens: parsers read them."""

TEXT = """The sailors were asleep when the wind turned. Nobody had expected the storm before the morning, and the
small boat was far from the harbour.

"What is the weather like?" asked the youngest of them. The answer was in the sound of the water: it was rising.
They took the sails down, tied what was loose, and waited. There was nothing else that they could do.

In the first light the coast was there again, with its white houses and the tower on the hill. The question was how
to get into the bay without touching the rocks.

- keep the tower on the left;
- count the waves: the third one is the highest;
- then turn, and let the current do the rest.

They arrived at nine, tired and hungry, and the people of the village gave them bread, fish and hot tea.


"Thank you," said the captain. "We shall come back in the summer."

"""
"""What the ranks are made of: the line ends in it become tokens, alone and after a mark."""


def save_kimi_tokenizer(folder: Path) -> None:
    """Write the tokenizer, its code, the chat template and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(_ranks())]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    for name in ("tokenization_kimi.py", "chat_template.jinja"):
        shutil.copy(Path(__file__).with_name(name), folder / name)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    generation = {"bos_token_id": BOS, "eos_token_id": END_OF_TURN, "max_length": 2048}
    _write_json(folder / "generation_config.json", generation)


def _tokenizer_config() -> dict:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens = sorted([(i, t, True) for t, i in SPECIAL.items()] + [(i, t, False) for t, i in NOT_SPECIAL.items()])
    turns = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>", "<|end_header_id|>", "[EOT]"]
    return {
        "added_tokens_decoder": {str(i): {"content": t, "special": s, **plain} for i, t, s in tokens},
        "additional_special_tokens": [*turns, "<|im_system|>", "<|im_middle|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 2048,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def _ranks() -> list[bytes]:
    """The 256 bytes, then the most frequent pair again and again; of equally frequent ones the first by its bytes."""
    import regex

    from tests.kimi.tokenization_kimi import PIECES

    ranks = [bytes([byte]) for byte in range(256)]
    pieces = Counter(regex.findall(PIECES, TEXT))
    split = {piece: [bytes([byte]) for byte in piece.encode()] for piece in pieces}
    while len(ranks) < BOS:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for piece, count in pieces.items():
            for pair in zip(split[piece], split[piece][1:], strict=False):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks.append(best[0] + best[1])
        split = {piece: _merged(parts, best) for piece, parts in split.items()}
    return ranks


def _merged(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
