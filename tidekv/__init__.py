"""TideKV: prefill long prompts layer by layer, with a KV cache that is compact from the start.

import tidekv

ids = tokenizer(prompt, return_tensors="pt").input_ids
tidekv.generate(model, ids, selector="snapkv", budget=1024, max_new_tokens=64)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv.caches import (
        CompactCache,
        HostCache,
        QuantisedCache,
        QuantisedRaggedCache,
        RaggedCache,
    )
    from tidekv.engine import Prefill, decode, generate, prefill
    from tidekv.errors import InfeasibleError
    from tidekv.loading import encode, load_model
    from tidekv.schedules import (
        Chunked,
        HeadOffload,
        KvOffload,
        LayerMajor,
        Online,
        WholePrompt,
    )
    from tidekv.selectors import (
        CAKE,
        H2O,
        TOVA,
        AdaKV,
        ChunkKV,
        KeyDiff,
        Knorm,
        KvPress,
        PyramidKV,
        Random,
        Recent,
        SnapKV,
        StreamingLLM,
    )

__all__ = [
    "CAKE",
    "H2O",
    "TOVA",
    "AdaKV",
    "ChunkKV",
    "Chunked",
    "CompactCache",
    "HeadOffload",
    "HostCache",
    "InfeasibleError",
    "KeyDiff",
    "Knorm",
    "KvOffload",
    "KvPress",
    "LayerMajor",
    "Online",
    "Prefill",
    "PyramidKV",
    "QuantisedCache",
    "QuantisedRaggedCache",
    "RaggedCache",
    "Random",
    "Recent",
    "SnapKV",
    "StreamingLLM",
    "WholePrompt",
    "decode",
    "encode",
    "generate",
    "load_model",
    "prefill",
]

#: Where names come from; the others are selectors.
_HOMES = {
    "InfeasibleError": "errors",
    "Prefill": "engine",
    "decode": "engine",
    "encode": "loading",
    "generate": "engine",
    "load_model": "loading",
    "prefill": "engine",
    **dict.fromkeys(
        ("CompactCache", "HostCache", "QuantisedCache", "QuantisedRaggedCache", "RaggedCache"),
        "caches",
    ),
    **dict.fromkeys(
        ("Chunked", "HeadOffload", "KvOffload", "LayerMajor", "Online", "WholePrompt"), "schedules"
    ),
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``tidekv --help`` must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"tidekv.{_HOMES.get(name, 'selectors')}"), name)
