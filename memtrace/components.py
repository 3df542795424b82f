"""The components of the accounting equation and its two identities.

    M_live    = max over time of (KV_res + Hidden + Act + Temp)            (1)
    M_process ≈ model + M_live + backend + allocator + external            (2)

A *tensor component* is a label on a storage. It may carry a detail after a slash
(``KV_res/full``, ``KV_res/compact``); sums and budgets use the part before it.
"""

from collections.abc import Collection, Mapping

#: Every byte of a storage belongs to exactly one of these, in display order.
TENSOR_COMPONENTS = ("model", "KV_res", "Hidden", "Act", "Temp", "backend", "other")

#: The terms of equation (1).
LIVE_COMPONENTS = ("KV_res", "Hidden", "Act", "Temp")

#: What only the device allocator and the process can tell, in display order.
PROCESS_COMPONENTS = ("allocator", "external")

COMPONENTS = TENSOR_COMPONENTS + PROCESS_COMPONENTS

#: One colour a component, in every table and chart. Paul Tol's "muted" scheme (colour-blind safe),
#: ordered so that neighbours in a stack differ in lightness as well as in hue.
COLOURS: Mapping[str, str] = {
    "model": "#DDDDDD",
    "KV_res": "#332288",
    "Hidden": "#88CCEE",
    "Act": "#882255",
    "Temp": "#DDCC77",
    "backend": "#117733",
    "other": "#CC6677",
    "allocator": "#44AA99",
    "external": "#999933",
}


def base(component: str) -> str:
    """``"KV_res/full"`` → ``"KV_res"``.

    Raises:
        ValueError: the part before the slash is no tensor component.
    """
    name = component.partition("/")[0]
    if name not in TENSOR_COMPONENTS:
        raise ValueError(
            f"{component!r} is not a component; use one of {', '.join(TENSOR_COMPONENTS)}, "
            "optionally followed by /detail"
        )
    return name


def among(component: str, only: Collection[str] | None) -> bool:
    """Whether a component is one of ``only``, with its detail or without; None: of any."""
    return only is None or component in only or component.partition("/")[0] in only


def allocated(components: Mapping[str, int]) -> int:
    """First identity: Σ tensor components = allocated, in bytes, exactly."""
    return sum(components[name] for name in TENSOR_COMPONENTS)


def live(components: Mapping[str, int]) -> int:
    """The sum inside equation (1), in bytes."""
    return sum(components[name] for name in LIVE_COMPONENTS)


def external(process: int, reserved: int) -> int:
    """Second identity: allocated + allocator + external = process, solved for ``external``.

    ``reserved`` is allocated + allocator. The result may be negative (pages counted as allocated
    that are not resident): it is shown as it is, never clamped.
    """
    return process - reserved
