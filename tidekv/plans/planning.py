"""What ``tidekv plan`` does: dry runs of ``tidekv run`` on cards that aren't there.

A plan is a recorded run like another; beside its terms stand those of :mod:`tidekv.formulas`
(:mod:`tidekv.plans.planned`). No torch here: the planned process alone loads it. What reads the run
is imported while that process works.
"""

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.allocator.settings import NEWEST, Version, parse_version
from memtrace.dryrun import amend, dry_run
from memtrace.virtual_gpu import READ_UNFOLLOWED, SAID
from memtrace.virtual_gpu.torches import version_of
from tidekv.arguments import PLACEMENT, flag_of
from tidekv.errors import TidekvError, check_choice
from tidekv.plans.cards import card_of, largest_card

if TYPE_CHECKING:
    from memtrace.trace.reader import Trace
    from tidekv.plans.planned import Plan

#: Methods that have a name; what they set of the command line.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "snapkv": {"schedule": "whole_prompt", "chunk_size": None, "piece_rows": None},
    "mst": {
        "schedule": "whole_prompt",
        "schedule_option": ["mlp_rows=4096"],
        "chunk_size": None,
        "piece_rows": None,
    },
    "tidekv": {"schedule": "layer_major"},
    "published": {"schedule": "layer_major_published", "piece_rows": None},
    "chunked": {"schedule": "chunked"},
    "full": {"schedule": "chunked", "selector": "none"},
    "online": {"schedule": "online"},
    "keydiff": {"schedule": "online", "selector": "keydiff"},
    "kivi": {
        "schedule": "whole_prompt",
        "selector": "none",
        "cache": "kivi",
        "chunk_size": None,
        "piece_rows": None,
    },
    "headinfer": {"schedule": "head_offload", "selector": "none"},
}
#: Options of ``tidekv run`` that a plan hands on, by their names in the command line.
_PASSED = (
    *("model", "schedule", "selector", "cache", "budget", "chunk_size", "schedule_option"),
    *("selector_option", "cache_option", "scoring", "attention", "dtype", "batch", "piece_rows"),
    *PLACEMENT,
)
#: PyTorch warns of each request that meets no room; that is what is asked here.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def named(arguments: argparse.Namespace, name: str) -> argparse.Namespace:
    """The command line with a method of :data:`METHODS`.

    Raises:
        InfeasibleError: there is none of this name.
    """
    check_choice("method", name, METHODS)
    return argparse.Namespace(**{**vars(arguments), **METHODS[name]})


def name_of(arguments: argparse.Namespace) -> str:
    """A method's name, or what was chosen in words."""
    for name, chosen in METHODS.items():
        plain = {"selector": "snapkv", "schedule_option": []}
        if all(getattr(arguments, key) == value for key, value in (plain | dict(chosen)).items()):
            return name
    return f"{arguments.schedule}, {arguments.selector}"


def options(arguments: argparse.Namespace) -> list[str]:
    """What of the command line is an option of ``tidekv run``."""
    found: list[str] = []
    for name in _PASSED:
        value, flag = getattr(arguments, name), flag_of(name)
        if value is True:
            found.append(flag)
        elif isinstance(value, list):
            found += [part for one in value for part in (flag, one)]
        elif value is not None and value is not False:
            found += [flag, str(value)]
    return found


def plan(arguments: argparse.Namespace, method: str, out: Path) -> "Plan":
    """Plan one prompt; the new run is ``out``.

    Raises:
        TidekvError: bad input, or no virtual card can be had.
        SystemExit: the planned run failed, and has said why.
    """
    if out.exists():
        raise TidekvError(f"{out} is there already; remove it or name another with -o.")
    if arguments.torch and parse_version(arguments.torch) != _installed():
        return _modelled(arguments, method, out)
    words = ["run", *options(arguments), "--prompt-tokens", str(arguments.prompt)]
    words += ["--max-new-tokens", "0", "--json"]
    if arguments.device == "cpu":  # the same command as a run there
        card = None
        words += ["--device", "cpu"]
    else:
        card = card_of(arguments.device)
        words += ["--device", "cuda", "--untrained"]
    trace, _ = run(arguments, ["tidekv", *words], out)
    from tidekv.plans.planned import Plan, moment_of

    moment, unknown = moment_of(arguments, card)
    found = Plan(method, card, arguments.prompt, trace, moment, unknown)
    if found.fits:
        check_ended(trace)
    return found


def _installed() -> Version:
    return parse_version(version_of([sys.executable]))


def _modelled(arguments: argparse.Namespace, method: str, out: Path) -> "Plan":
    """As :func:`plan`, by the allocator of another PyTorch: a replay of the installed one's run.

    Where that runs out of memory its requests end there, so those on the largest card are taken.
    """
    from memtrace.analysis.what_if import Change, replayed
    from tidekv.plans.planned import Plan, moment_of

    version, card = arguments.torch, card_of(arguments.device)
    if parse_version(version) > NEWEST:
        newest = ".".join(map(str, NEWEST))
        raise TidekvError(f"The allocator of torch {version} isn't known; the newest is {newest}.")
    change = Change(arguments.allocator, card.key, version)
    with tempfile.TemporaryDirectory(prefix="tidekv-") as scratch:
        for number, device in enumerate((card.key, largest_card().key)):
            here = argparse.Namespace(**{**vars(arguments), "device": device, "torch": None})
            here.allocator = ""
            found = plan(here, method, Path(scratch) / f"{number}.memtrace")
            if found.fits:
                break
        if found.account is None:  # it failed before it used the card, and has said why
            raise SystemExit(1)
        replayed(found.trace, found.account.account, change, out)
    installed = ".".join(map(str, _installed()))
    clause = (
        f"by the rules of torch {version}'s allocator, from the requests that torch {installed} "
        f"makes on {card_of(device).name}"
    )
    moment, unknown = moment_of(arguments, card)
    trace = amend(out, device=card.key, allocator=arguments.allocator, modelled=[clause])
    return Plan(method, card, arguments.prompt, trace, moment, unknown, f"Modelled: {clause}.")


def run(
    arguments: argparse.Namespace, words: Sequence[str], out: Path, source: str = "auto"
) -> tuple["Trace", str]:
    """Dry-run ``python -m WORDS…``; its trace and its standard output.

    Hardly a prefill reads a value, so first without following them.
    """
    trace, text = _run_once(arguments, words, out, source, follow_values=False)
    if trace.manifest["exit"]["code"] == READ_UNFOLLOWED:
        shutil.rmtree(out)
        trace, text = _run_once(arguments, words, out, source, follow_values=True)
    return trace, text


def _run_once(
    arguments: argparse.Namespace,
    words: Sequence[str],
    out: Path,
    source: str,
    *,
    follow_values: bool,
) -> tuple["Trace", str]:
    reader = threading.Thread(target=import_module, args=("tidekv.plans.planned",), daemon=True)
    reader.start()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        trace = dry_run(
            [sys.executable, "-m", *words],
            device=arguments.device,
            out=out,
            engine=arguments.engine,
            allocator=arguments.allocator,
            source=source,
            variables=_QUIET | ({SAID: "1"} if follow_values else {}),  # it was said before
            stdout=said.fileno(),
            follow_values=follow_values,
        )
        said.seek(0)
        return trace, said.read()


def check_ended(trace: "Trace") -> None:
    """End as a planned process did that had room and failed.

    It has said why, unless it was killed.
    """
    ended = trace.manifest["exit"]
    code = ended["code"] if ended["code"] is not None else 128 + ended["signal"]
    if code == 130:
        raise KeyboardInterrupt
    if ended["code"] is None:
        verdict = trace.manifest["death"]["verdict"]
        print(f"tidekv: The planned process was {verdict}.", file=sys.stderr)
    if code:
        raise SystemExit(code)
