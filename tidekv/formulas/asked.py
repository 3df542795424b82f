"""From the command line of ``tidekv plan`` to what formulas know."""

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from memtrace.devices import Device
from tidekv import budgets
from tidekv.errors import TidekvError
from tidekv.formulas.attention import kernel_of
from tidekv.formulas.moments import Case
from tidekv.loading import config_of
from tidekv.shapes import FAMILIES, shape_of


class UnknownFormula(Exception):
    """Why there are no formulas for what was asked, in a clause."""


#: What has parts of a prefill elsewhere than on the device.
PLACEMENT = ("stream_weights", "host_bridge", "park_caches", "host_embeddings")
#: What schedules, selectors and the quantised cache take where nothing is said, as far as it
#: decides about memory; a test holds it to the classes.
DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "schedule": {
        "whole_prompt": {"mlp_rows": None},
        "chunked": {"chunk_size": 512, "piece_rows": 512},
        "layer_major": {"chunk_size": 512, "piece_rows": 512},
        "online": {"chunk_size": 512, "piece_rows": 512},
        "head_offload": {"chunk_size": 512, "piece_rows": 512},
    },
    "selector": {
        "none": {},
        "snapkv": {"window": 32, "block_size": 2048, "kernel_size": 7},
    },
    "cache": {"full_precision": {}},
}


def case_of(arguments: argparse.Namespace, card: Device) -> Case:
    """What was asked of a card.

    Raises:
        UnknownFormula: formulas don't know this, or it can't be and the run will say why.
    """
    shape = shape_of(config_of(arguments.model), arguments.dtype)
    if shape is None:
        raise UnknownFormula(
            f"they know the families {', '.join(sorted(FAMILIES))} in float32, bfloat16 or float16"
        )
    if placed := [one for one in PLACEMENT if getattr(arguments, one)]:
        raise UnknownFormula(f"they don't know --{placed[0].replace('_', '-')}")
    if arguments.scoring != "blockwise":
        raise UnknownFormula("they know blockwise scoring")
    if arguments.attention == "flash_attention_2" and find_spec("flash_attn") is not None:
        raise UnknownFormula("the flash-attn package has kernels of its own")
    kernel = kernel_of(arguments.attention, shape)
    if kernel is None:
        raise UnknownFormula(f"they don't know what {arguments.attention} takes for this model")
    schedule, selector = _given(arguments, "schedule"), _given(arguments, "selector")
    _given(arguments, "cache")
    prompt = arguments.prompt
    budget = budgets.default(prompt) if arguments.budget is None else arguments.budget
    if arguments.selector == "none":
        budget = prompt
    try:
        kept = budgets.rows(budget, prompt)
    except TidekvError as error:
        raise UnknownFormula("there is no such prefill") from error
    return Case(
        shape=shape,
        schedule=arguments.schedule,
        selector=None if arguments.selector == "none" else arguments.selector,
        kernel=kernel,
        batch=arguments.batch,
        prompt=prompt,
        kept=(kept,) * shape.layers,
        chunk=min(arguments.chunk_size or schedule.get("chunk_size", prompt), prompt),
        piece=arguments.piece_rows or schedule.get("piece_rows", prompt),
        window=selector.get("window", 0),
        block=selector.get("block_size", prompt),
        pooled=selector.get("kernel_size", 1),
        mlp_rows=schedule.get("mlp_rows"),
        quantised=None,
        placed=frozenset(),
        workspace=card.cublas_workspace,
        processors=card.processors,
    )


def _given(arguments: argparse.Namespace, what: str) -> dict[str, Any]:
    """The parameters of the schedule, selector or cache that was chosen."""
    name = getattr(arguments, what)
    known = DEFAULTS[what].get(name)
    if known is None:
        raise UnknownFormula(f"they don't know the {what} {name}")
    values = dict(known)
    for pair in getattr(arguments, f"{what}_option"):
        key, _, text = pair.partition("=")
        if key not in known or not text.isdecimal():
            raise UnknownFormula(f"they don't know {pair} of the {what} {name}")
        values[key] = int(text)
    return values
