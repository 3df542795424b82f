"""Schedules: in which order a prefill advances chunks and layers, and what lives meanwhile.

Adding one is one file and one line here.
"""

from collections.abc import Callable, Mapping

from tidekv.schedules.base import Eviction, Filled, Task
from tidekv.schedules.layer_major import layer_major
from tidekv.schedules.whole_prompt import whole_prompt

Schedule = Callable[[Task], Filled]

SCHEDULES: Mapping[str, Schedule] = {
    "whole_prompt": whole_prompt,
    "layer_major": layer_major,
}

__all__ = ["SCHEDULES", "Eviction", "Filled", "Schedule", "Task"]
