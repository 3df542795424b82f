"""From the command line of ``tidekv plan`` to what formulas know."""

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from memtrace.devices import Device
from tidekv import budgets
from tidekv.arguments import PLACEMENT
from tidekv.errors import TidekvError
from tidekv.formulas.attention import kernel_of
from tidekv.formulas.moments import Case, Quantised
from tidekv.loading import config_of
from tidekv.shapes import FAMILIES, groups_efficiently, shape_of


class UnknownFormula(Exception):
    """Why there are no formulas for what was asked, in a clause."""


#: Schedules that call transformers' own attention without a mask, for which it expands no heads.
_MASKLESS = ("whole_prompt", "kv_offload")
_SNAPKV = {"window": 32, "block_size": 2048, "kernel_size": 7, "sinks": 4}
#: Parameters that may be 0; all others are sizes.
_ZERO = frozenset({"sinks", "safeguard"})
#: What schedules, selectors and the quantised cache take where nothing is said, as far as it
#: decides about memory; a test holds it to the classes.
DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "schedule": {
        "whole_prompt": {"mlp_rows": None},
        "kv_offload": {"mlp_rows": 4096},
        "chunked": {"chunk_size": 512, "piece_rows": 512},
        "layer_major": {"chunk_size": 512, "piece_rows": 512},
        "layer_major_published": {"chunk_size": 2048},
        "online": {"chunk_size": 512, "piece_rows": 512},
        "head_offload": {"chunk_size": 512, "piece_rows": 512},
    },
    "selector": {
        "none": {},
        "snapkv": _SNAPKV,
        "pyramidkv": {**_SNAPKV, "beta": 20},
        "adakv": {**_SNAPKV, "safeguard": 0.2},
        "cake": {"window": 32, "block_size": 2048, "kernel_size": 5},
        "chunkkv": {"window": 32, "block_size": 2048, "chunk": 10},
        "tova": {"block_size": 2048},
        "h2o": {"block_size": 2048},
        "keydiff": {"block_size": 2048},
        "knorm": {},
        "streamingllm": {},
        "recent": {},
        "random": {},
    },
    "cache": {"full_precision": {}, "kivi": {"bits": 2, "group": 32, "residual": 128}},
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
    placed = frozenset(one for one in PLACEMENT if getattr(arguments, one))
    if placed and arguments.schedule != "layer_major":
        raise UnknownFormula("there is no such prefill")
    if arguments.scoring != "blockwise":
        raise UnknownFormula("they know blockwise scoring")
    if arguments.selector == "cake" and arguments.cache != "full_precision":
        raise UnknownFormula("they don't know what kivi takes of cake's rows")
    if arguments.attention == "flash_attention_2" and find_spec("flash_attn") is not None:
        raise UnknownFormula("the flash-attn package has kernels of its own")
    attention = arguments.attention
    if attention == "sdpa" and arguments.schedule == "layer_major_published":
        attention = "sdpa_efficient"  # there is a mask
    if card.capability < (8, 0):
        raise UnknownFormula("they count the kernels of compute capability 8.0 and newer")
    kernel = kernel_of(attention, shape)
    if kernel is None:
        raise UnknownFormula(f"they don't know what {arguments.attention} takes for this model")
    grouped = shape.kv_heads < shape.query_heads and arguments.schedule in _MASKLESS
    if kernel == "efficient" and grouped and not groups_efficiently():
        if attention == "sdpa_efficient":
            raise UnknownFormula("there is no such prefill")
        kernel = "math"
    schedule, selector = _given(arguments, "schedule"), _given(arguments, "selector")
    cache = _given(arguments, "cache")
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
        kept=_kept(arguments, shape.layers, kept, selector),
        chunk=min(arguments.chunk_size or schedule.get("chunk_size", prompt), prompt),
        piece=arguments.piece_rows or schedule.get("piece_rows", prompt),
        window=1 if arguments.selector == "tova" else selector.get("window", 0),
        block=selector.get("block_size", prompt),
        pooled=selector.get("kernel_size", 1),
        sinks=selector.get("sinks", 0),
        fewest=_fewest(prompt, kept, selector),
        row_chunk=selector.get("chunk", 1),
        mlp_rows=schedule.get("mlp_rows"),
        quantised=Quantised(**cache) if cache else None,
        placed=placed,
        workspace=card.cublas_workspace,
        processors=card.processors,
    )


def _kept(
    arguments: argparse.Namespace, layers: int, rows: int, selector: Mapping[str, Any]
) -> tuple[int, ...]:
    """Rows of each layer; a pyramid's are those beside the window and the sinks."""
    if arguments.selector != "pyramidkv":
        return (rows,) * layers
    always = selector["window"] + selector["sinks"]
    free = budgets.pyramid(
        layers, mean=rows - always, most=arguments.prompt - always, beta=selector["beta"]
    )
    return tuple(always + one for one in free)


def _fewest(prompt: int, rows: int, selector: Mapping[str, Any]) -> int:
    """Rows that Ada-KV leaves every head: window, sinks, its share of what is spread."""
    if rows >= prompt or "safeguard" not in selector:
        return rows
    always: int = selector["window"] + selector["sinks"]
    return int(selector["safeguard"] * (rows - always)) + always


def _given(arguments: argparse.Namespace, what: str) -> dict[str, Any]:
    """The parameters of the schedule, selector or cache that was chosen."""
    name = getattr(arguments, what)
    known = DEFAULTS[what].get(name)
    if known is None:
        raise UnknownFormula(f"they don't know the {what} {name}")
    values = dict(known)
    for pair in getattr(arguments, f"{what}_option"):
        key, _, text = pair.partition("=")
        try:
            values[key] = type(known[key] or 0)(text)
        except (KeyError, ValueError):
            raise UnknownFormula(f"they don't know {pair} of the {what} {name}") from None
        if values[key] < (0 if key in _ZERO else 1):
            raise UnknownFormula("there is no such prefill")
    return values
