"""What engine `stream` holds at most, by the settings alone. Nothing heavy is imported: preflight and forecast ask too.

A token's states are `token_bytes`: captured layers x hidden size x bytes of a number.
"""

from pipeline.config import ExtractSection, Run

RING_STEPS = 4
"""Steps whose states wait in host memory to be put in their places: one on its way, one being copied, two of slack."""
FEED = 4
"""Steps whose tokens the engine holds at least: two are under way, and the next ones should not have to wait for us."""
STEPS_UNDER_WAY = 2
"""vLLM schedules a step while the one before it runs, and counts the requests of both."""
BLOCK_TOKENS = 16
"""Of vLLM's cache, on GPUs: a request's keys and values take whole blocks."""


def shards_in_hand(section: ExtractSection) -> int:
    """Shards that may be in memory at once, from the first request of a sample to the record on the disk: those that
    are written, those that the engine holds, and one more, since the driver hears late of what is written. A step has
    rows of one shard only."""
    held = -(-FEED * section.max_batched_tokens // section.shard_tokens)
    return section.writers + min(held, FEED) + 1


def stage_bytes(section: ExtractSection, token_bytes: int) -> int:
    """GPU memory: the states of one step."""
    return section.max_batched_tokens * token_bytes


def ring_bytes(section: ExtractSection, token_bytes: int) -> int:
    """Memory of the worker from the engine's start on: steps that wait."""
    return RING_STEPS * stage_bytes(section, token_bytes)


def host_bytes(section: ExtractSection, token_bytes: int) -> int:
    """Memory of the worker at most, where no sample is longer than a shard: the ring and the shards in hand."""
    shards = shards_in_hand(section) * section.shard_tokens * token_bytes
    return ring_bytes(section, token_bytes) + shards


def cache_tokens(config: Run, block_tokens: int = BLOCK_TOKENS) -> int:
    """Tokens whose keys and values are wanted at once: those of the steps under way, and of the sample that reaches
    over them, each request in whole blocks. With fewer, vLLM begins requests anew when the clock has it so."""
    section = config.extract
    step = section.max_batched_tokens + section.max_num_seqs * block_tokens
    return config.target.max_length + STEPS_UNDER_WAY * step
