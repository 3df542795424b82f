"""What decoding continues from: transformers caches of fewer rows, or fewer bits, than usual.

A schedule calls ``cache.layers[i].store(…)`` or ``.store_flat(…)`` at a layer's end, and
``.finish()`` once its rows are final, whatever the cache is.
"""

from tidekv.caches.compact import CompactCache, CompactLayer, rows_of
from tidekv.caches.host import HostCache, HostLayer
from tidekv.caches.quantised import QuantisedCache, QuantisedLayer
from tidekv.caches.quantised_ragged import QuantisedRaggedCache, QuantisedRaggedLayer
from tidekv.caches.ragged import RaggedCache, RaggedLayer

__all__ = [
    "CompactCache",
    "CompactLayer",
    "HostCache",
    "HostLayer",
    "QuantisedCache",
    "QuantisedLayer",
    "QuantisedRaggedCache",
    "QuantisedRaggedLayer",
    "RaggedCache",
    "RaggedLayer",
    "rows_of",
]
