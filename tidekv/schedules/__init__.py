"""Schedules: in which order a prefill advances chunks and layers, and what lives meanwhile.

Adding one is one file and one line here.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tidekv.errors import check_choice, check_made
from tidekv.schedules.base import Filled, Schedule, Task
from tidekv.schedules.chunked import Chunked
from tidekv.schedules.head_offload import HeadOffload
from tidekv.schedules.kv_offload import KvOffload
from tidekv.schedules.layer_major import LayerMajor
from tidekv.schedules.layer_major_published import LayerMajorPublished
from tidekv.schedules.online import Online
from tidekv.schedules.whole_prompt import WholePrompt

SCHEDULES: Mapping[str, type[Schedule]] = {
    "whole_prompt": WholePrompt,
    "chunked": Chunked,
    "layer_major": LayerMajor,
    "layer_major_published": LayerMajorPublished,
    "online": Online,
    "head_offload": HeadOffload,
    "kv_offload": KvOffload,
}

__all__ = [
    "SCHEDULES",
    "Chunked",
    "Filled",
    "HeadOffload",
    "KvOffload",
    "LayerMajor",
    "LayerMajorPublished",
    "Online",
    "Schedule",
    "Task",
    "WholePrompt",
    "make",
]


def make(schedule: str | Schedule, chunk_size: int | None = None) -> Schedule:
    """A name stands for the schedule with its defaults.

    Args:
        chunk_size: replaces the schedule's own, if it has chunks.

    Raises:
        InfeasibleError: no schedule has this name, it is none, or its parameters can't be.
    """
    if isinstance(schedule, str):
        check_choice("schedule", schedule, SCHEDULES)
        schedule = SCHEDULES[schedule]()
    check_made("schedule", schedule, Schedule)
    chosen: Any = schedule  # a dataclass
    if chunk_size is not None and any(one.name == "chunk_size" for one in fields(chosen)):
        chosen = replace(chosen, chunk_size=chunk_size)
    made: Schedule = chosen
    made.check()
    return made
