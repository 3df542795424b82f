"""TideKV: prefill long prompts layer by layer, with a KV cache that is compact from the start.

import tidekv

ids = tokenizer(prompt, return_tensors="pt").input_ids
tidekv.generate(model, ids, selector="snapkv", budget=1024, max_new_tokens=64)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv.cache import CompactCache
    from tidekv.engine import Prefill, decode, generate, prefill
    from tidekv.errors import InfeasibleError
    from tidekv.loading import encode, load_model
    from tidekv.selectors import SnapKV

_HOMES = {
    "CompactCache": "tidekv.cache",
    "InfeasibleError": "tidekv.errors",
    "Prefill": "tidekv.engine",
    "SnapKV": "tidekv.selectors",
    "decode": "tidekv.engine",
    "encode": "tidekv.loading",
    "generate": "tidekv.engine",
    "load_model": "tidekv.loading",
    "prefill": "tidekv.engine",
}

__all__ = [
    "CompactCache",
    "InfeasibleError",
    "Prefill",
    "SnapKV",
    "decode",
    "encode",
    "generate",
    "load_model",
    "prefill",
]


def __getattr__(name: str) -> Any:
    """Import on first use: ``tidekv --help`` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
