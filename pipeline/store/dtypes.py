"""As what states may be stored, and the bytes that this takes. Without torch: `preflight` counts with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """A type of stored states: its name, safetensors' code for it, bytes of a number and of a row's scale."""

    name: str
    code: str
    item_bytes: int
    scale_bytes: int = 0

    def row_bytes(self, hidden_size: int) -> int:
        """One layer's state of one token."""
        return hidden_size * self.item_bytes + self.scale_bytes


_STORED = {
    stored.name: stored
    for stored in (
        Stored("float32", "F32", 4),
        Stored("bfloat16", "BF16", 2),
        Stored("float16", "F16", 2),
        Stored("fp8", "F8_E4M3", 1, scale_bytes=4),
    )
}


def stored_dtype(dtype: str, store_dtype: str | None) -> Stored:
    """What becomes of states of `dtype` (`target.dtype`) in a file by `extract.store_dtype`: None, `bf16` or `fp8`."""
    return _STORED[{None: dtype, "bf16": "bfloat16"}.get(store_dtype, store_dtype or dtype)]


def is_encoded(dtype: str, store_dtype: str | None) -> bool:
    """Whether the files hold something else than the states as they were computed."""
    return stored_dtype(dtype, store_dtype).name != dtype
