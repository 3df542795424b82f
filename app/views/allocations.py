"""Every allocation of a run: searched, filtered, sorted, a page at a time; and the hot spots."""

from collections.abc import Sequence
from math import ceil

import numpy as np
import streamlit as st

from app import frames_allocations as frames
from app.figures.hot_spots import describe, hot_spots
from app.load import BY_SUBJECT, MOST, Subject
from app.parts import chart, escaped, look, table
from memtrace.analysis.catalogue import Catalogue, Order, Query
from memtrace.components import TENSOR_COMPONENTS
from memtrace.errors import MemtraceError
from memtrace.sizes import parse_size
from memtrace.trace.manifest import Knowledge

TITLE, PATH = "Allocations", "allocations"

_ROWS = 25  # of a page
_SPOTS = 12
_SAVED = 100_000  # rows of a table as CSV


@st.fragment
def draw(subjects: Sequence[Subject]) -> None:
    """The allocations of one subject at a time."""
    names = {subject.name: subject for subject in subjects}
    subject = subjects[0]
    if len(subjects) > 1:
        chosen = st.selectbox("Allocations of", list(names), key="of", bind="query-params")
        subject = names[chosen]
    query = _asked()
    if query is None:
        return
    catalogue = _catalogue(subject)
    rows = catalogue.find(query)
    if not len(rows):
        st.info("No allocation is as the filters say.")
        return
    _table(catalogue, rows)
    _hot_spots(catalogue, rows, subject)


@st.cache_resource(max_entries=MOST, hash_funcs=BY_SUBJECT, show_spinner=False)
def _catalogue(subject: Subject) -> Catalogue:
    return Catalogue(subject.account.account)


def _asked() -> Query | None:
    """What the reader looks for; None: it can't be read, which is said."""
    search, component = st.columns(2)
    words = search.text_input(
        "Search",
        key="search",
        bind="query-params",
        placeholder="layer 7, aten.mm",
        help="Parts of the request, phase, layer, chunk, module, operator or stack; an allocation "
        "has to have all that commas separate.",
    )
    components = component.multiselect(
        "Components", TENSOR_COMPONENTS, key="component", bind="query-params"
    )
    least, most, shortest, longest = st.columns(4)
    texts = (
        least.text_input("Size at least", key="least", bind="query-params", placeholder="1 MiB"),
        most.text_input("Size at most", key="most", bind="query-params", placeholder="2 GiB"),
        shortest.text_input(
            "Lives at least, s", key="shortest", bind="query-params", placeholder="0.001"
        ),
        longest.text_input("Lives at most, s", key="longest", bind="query-params", placeholder="1"),
    )
    kept = st.checkbox("Never freed", key="kept", bind="query-params")
    try:
        low, high = (parse_size(text) if text.strip() else None for text in texts[:2])
        short, long = (_microseconds(text) if text.strip() else None for text in texts[2:])
    except MemtraceError as error:
        st.error(escaped(str(error)))
        return None
    return Query(words, tuple(components), (low, high), (short, long), kept)


def _microseconds(text: str) -> int:
    try:
        return round(float(text) * 1e6)
    except (ValueError, OverflowError):
        raise MemtraceError(f"{text!r} is not a time; write seconds, such as 0.5") from None


def _table(catalogue: Catalogue, rows: np.ndarray) -> None:
    order, number, save = st.columns([2, 2, 1], vertical_alignment="bottom")
    sorted_by = Order(
        order.selectbox("Sorted by", [str(one) for one in Order], key="sorted", bind="query-params")
    )
    pages = ceil(len(rows) / _ROWS)
    if st.session_state.get("page", 1) > pages:  # of what was looked for before
        st.session_state["page"] = pages
    page = number.number_input(f"Page of {pages:,}", 1, pages, key="page", bind="query-params")
    shown = catalogue.page(rows, sorted_by, (page - 1) * _ROWS, _ROWS)
    save.download_button(
        "CSV",
        lambda: frames.data(catalogue.read(catalogue.page(rows, sorted_by, 0, _SAVED))).to_csv(
            index=False
        ),
        file_name="memtrace-allocations.csv",
        mime="text/csv",
        on_click="ignore",
        type="tertiary",
        help=f"what is found, the first {_SAVED:,} in this order, sizes in bytes",
    )
    st.caption(f"{len(rows):,} of {len(catalogue.account.lives.born):,} allocations.")
    table(frames.listed(catalogue.read(shown)).set_index("component"))


def _hot_spots(catalogue: Catalogue, rows: np.ndarray, subject: Subject) -> None:
    st.subheader("Hot spots: size x lifetime")
    spots = catalogue.hot_spots(rows, _SPOTS)
    chart(
        hot_spots(spots, look()),
        lambda: frames.hot_spots(spots),
        key="hot-spots",
        alt=describe(spots),
    )
    text = "What the same operator made in the same kind of place, of any request, layer and chunk."
    if subject.summary.knowledge != Knowledge.MEASURED:
        text += f" Times of a {subject.summary.knowledge} run are not those of a card."
    st.caption(text)
