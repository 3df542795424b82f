"""Where :mod:`tidekv.caches.compact` was."""

from tidekv.caches.compact import CompactCache, CompactLayer

__all__ = ["CompactCache", "CompactLayer"]
