"""The model's own forward, MLP in pieces, K/V on the host (MOM: Zhang et al. 2025, 2504.12526)."""

from dataclasses import dataclass
from typing import ClassVar

from tidekv.caches import CompactCache, HostCache
from tidekv.schedules.whole_prompt import WholePrompt


@dataclass(frozen=True)
class KvOffload(WholePrompt):
    """The model's own forward over the whole prompt, each layer's K/V leaving for the host.

    Attributes:
        mlp_rows: as of :class:`WholePrompt`, with MST's default for one prompt.
    """

    cache_class: ClassVar[type[CompactCache] | None] = HostCache

    mlp_rows: int | None = 4096
