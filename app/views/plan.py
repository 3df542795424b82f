"""Runs of cards that aren't there, and what fits them: ``tidekv plan`` as a page."""

from collections.abc import Sequence

import streamlit as st

from app import frames_plans
from app.figures.capacity import capacity, describe
from app.load import Subject, Unbooked
from app.making import say_problems, under_way, wait_for
from app.parts import chart, escaped, look, table
from app.plans import (
    METHODS,
    MODELS,
    PlannedCurves,
    PlannedRun,
    Prefill,
    plan,
    plan_curves,
    planned_curves,
    planned_runs,
    planning,
)
from memtrace.devices import Device, catalogue
from memtrace.errors import MemtraceError

TITLE, PATH = "Plan", "plan"

_NONE = "no settings"
_LENGTHS = "8192,16384,32768,65536,98304,131072"
#: Cards that are drawn until others are chosen.
_CARDS = ("rtx-4090-24g", "a100-40g")


def draw(subjects: Sequence[Subject | Unbooked]) -> None:
    """A form, and what came of each question; ``subjects`` don't matter."""
    st.markdown(
        "A prefill runs on a card that isn't there: a virtual GPU, or where that doesn't run a "
        "fake one. What comes of it is a run like any other: it is added to the runs above, for "
        "every page. Nothing is computed, so times mean nothing."
    )
    try:
        cards = catalogue()
    except MemtraceError as error:  # of the user's own catalogue
        st.error(escaped(str(error)))
        return
    _form(list(cards))
    say_problems()
    if running := planning():
        under_way(running)
    if found := planned_runs():
        _compared(found)
    if (curves := planned_curves()) is not None:
        _curves(curves, cards)


def _form(cards: Sequence[str]) -> None:
    with st.form("plan", enter_to_submit=False):
        methods, model = st.columns([2, 1])
        methods.multiselect("Methods", METHODS, ["snapkv", "tidekv"], key="plan methods")
        model.selectbox(
            "Model",
            MODELS,
            key="plan model",
            accept_new_options=True,
            help="a name, a folder or a hub id",
        )
        chunk, budget, conf = st.columns([1, 1, 2])
        chunk.number_input("Chunk size, tokens", 1, value=2048, step=512, key="plan chunk")
        budget.number_input("Budget, rows", 1, value=4096, step=512, key="plan budget")
        conf.selectbox(
            "PYTORCH_CUDA_ALLOC_CONF",
            [_NONE, "expandable_segments:True"],
            key="plan conf",
            accept_new_options=True,
        )
        one, several = st.columns(2)
        with one:
            st.number_input("Prompt, tokens", 1, value=131072, step=1024, key="plan prompt")
            st.selectbox("Card", cards, cards.index(_CARDS[0]), key="plan card")
            st.form_submit_button("Plan", type="primary", on_click=_plan)
        with several:
            st.text_input("Prompts of the capacity curve, tokens", _LENGTHS, key="plan lengths")
            st.caption("Planned on the card of the catalogue that has most memory.")
            st.form_submit_button("Draw the curve", on_click=_draw_curves)


def _prefill() -> Prefill:
    state = st.session_state
    conf = state["plan conf"]
    return Prefill(
        str(state["plan model"]),
        int(state["plan chunk"]),
        int(state["plan budget"]),
        "" if conf in (_NONE, None) else str(conf),
    )


def _plan() -> None:
    """What the button does, before the page is drawn again."""
    state = st.session_state
    for method in state["plan methods"]:
        wait_for(plan(_prefill(), method, int(state["plan prompt"]), state["plan card"]))


def _draw_curves() -> None:
    """The same."""
    state = st.session_state
    if state["plan methods"]:
        lengths = state["plan lengths"].replace(" ", "")
        wait_for(plan_curves(_prefill(), state["plan methods"], lengths))


def _compared(found: Sequence[PlannedRun]) -> None:
    st.subheader("What came of it")
    table(frames_plans.outcomes({one.name: one.document for one in found}))
    st.caption(
        "Where a card's CUDA context isn't known it isn't in what is left. These runs are gone "
        "when the viewer ends. To keep one:"
    )
    st.code("\n".join(one.command for one in found), language="shell", wrap_lines=True)


def _curves(found: PlannedCurves, cards: dict[str, Device]) -> None:
    st.subheader("Capacity")
    chosen = st.multiselect(
        "Cards",
        list(cards),
        [name for name in _CARDS if name in cards],
        key="cards",
        bind="query-params",
    )
    chart(
        capacity(found.curves, {name: cards[name].total for name in chosen}, look()),
        lambda: frames_plans.points(found.curves),
        key="capacity",
        alt=describe(found.curves),
    )
    on = ", ".join(dict.fromkeys(cards[one.card].name for one in found.curves))
    st.caption(
        escaped(
            f"Planned on {on}. A prompt whose allocated peak is above a card's line doesn't fit "
            "it. One whose reserved peak alone is above may: an allocator that is short of memory "
            "gives back what it caches. --max-context searches for the longest that fits."
        )
    )
    table(frames_plans.peaks(found.curves))
    st.code(found.command, language="shell", wrap_lines=True)
