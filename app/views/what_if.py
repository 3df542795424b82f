"""The run under other allocator settings, on another device, by another torch."""

import shlex
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app.load import Subject
from app.making import say_problems, under_way, wait_for
from app.parts import escaped, table
from app.replays import Replay, of, replay
from memtrace.allocator.settings import NEWEST, OLDEST
from memtrace.allocator.sweep import GRID
from memtrace.analysis.what_if import Change
from memtrace.devices import catalogue
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size
from memtrace.trace.schema import Action

TITLE, PATH = "What if", "what-if"

_OWN = "as recorded"
_NONE = "no settings"
_VERSIONS = [f"{OLDEST[0]}.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]


def draw(subjects: Sequence[Subject]) -> None:
    """A form, and what came of each replay."""
    names = {subject.name: subject for subject in subjects}
    name = st.selectbox("Replay", list(names), key="replay", bind="query-params")
    subject = names[name]
    st.markdown(
        "The requests of the run go through an exact simulation of PyTorch's caching allocator. "
        "What comes of it is a run like any other: it is added to the runs above, for every page."
    )
    with st.form("change"):
        conf, device, torch = st.columns(3)
        conf.selectbox(
            "PYTORCH_CUDA_ALLOC_CONF",
            [_OWN, _NONE, *filter(None, GRID)],
            key="conf",
            accept_new_options=True,
        )
        device.selectbox(
            "Device, or its memory",
            [_OWN, *_cards()],
            key="device",
            accept_new_options=True,
            help="a card of memtrace devices, or a size such as 24 GiB",
        )
        torch.selectbox("Rules of torch", [_OWN, *_VERSIONS], key="torch", accept_new_options=True)
        st.form_submit_button("Replay", type="primary", on_click=_replay, args=(subject,))
    say_problems()
    found = of(subject)
    running = [one for one in found if one.running]
    if running:
        under_way(running)
    made = [one for one in found if not one.running]
    if made:
        _compared(subject, made)


def _cards() -> list[str]:
    try:
        return list(catalogue())
    except MemtraceError as error:  # of the user's own catalogue
        st.error(escaped(str(error)))
        return []


def _replay(subject: Subject) -> None:
    """What the button does, before the page is drawn again."""
    conf, device, torch = (
        None if (chosen := st.session_state[key]) in (_OWN, None) else str(chosen)
        for key in ("conf", "device", "torch")
    )
    change = Change("" if conf == _NONE else conf, device, torch)
    wait_for(replay(subject, change))


def _compared(subject: Subject, made: Sequence[Replay]) -> None:
    st.subheader("What came of it")
    table(_outcomes(subject, made))
    for one in made:
        st.caption(escaped(f"{one.name}: {' '.join(one.notes)}"))
    st.markdown("These runs are gone when the viewer ends. To keep one:")
    st.code("\n".join(_command(one) for one in made), language="shell", wrap_lines=True)


def _outcomes(subject: Subject, made: Sequence[Replay]) -> pd.DataFrame:
    """A row a replay, after what was recorded."""
    account = subject.account
    process = account.account.process
    chosen = account.account.here & (process.contexts["action"] == Action.RETRY)
    retries = int(chosen[process.events["context"]].sum())
    recorded = (
        account.reserved_peak if account.account.process and account.device != "cpu" else None
    )
    rows = [
        (
            _OWN,
            "no allocator" if recorded is None else format_size(recorded),
            format_size(account.peak.allocated),
            f"{retries:,}",
            f"{len(account.ooms):,}",
        )
    ]
    rows += [
        (
            str(one.change),
            format_size(outcome.reserved_peak),
            format_size(outcome.allocated_peak),
            f"{outcome.retries:,}",
            f"{outcome.failures:,}",
        )
        for one in made
        if (outcome := one.outcome) is not None
    ]
    columns = ["run", "reserved at most", "allocated at most", "retries", "failed"]
    return pd.DataFrame(rows, columns=columns).set_index("run")


def _command(one: Replay) -> str:
    """The same in a shell."""
    words = ["memtrace", "replay", str(one.source)]
    if one.change.conf is not None:
        words += ["--conf", one.change.conf]
    if one.change.device in _cards():
        words += ["--device", str(one.change.device)]
    elif one.change.device is not None:
        words += ["--memory", one.change.device]
    if one.change.torch is not None:
        words += ["--torch", one.change.torch]
    return shlex.join([*words, "-o", f"{one.name}.memtrace"])
