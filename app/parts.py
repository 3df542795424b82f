"""What pages are made of: the one way to show a chart, a table and a text of a trace."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app.figures.style import DARK, LIGHT, Look, visible


def look() -> Look:
    """Light or dark, as the reader's browser or settings are."""
    return DARK if st.context.theme.type == "dark" else LIGHT


@dataclass(frozen=True)
class Gestures:
    """What is called with what the reader does in a chart; places are those of its x axis."""

    click: Callable[[Any], None]  # at a drawn point: what it stands for, or else its place
    span: Callable[[float, float], None]  # a box was drawn, from the lower place to the higher
    whole: Callable[[], None]  # a double click


def chart(
    figure: go.Figure,
    data: Callable[[], pd.DataFrame],
    *,
    key: str,
    alt: str,
    gestures: Gestures | None = None,
) -> None:
    """Show a figure, with buttons that save its data as CSV and itself as SVG or PNG.

    Args:
        data: makes what the figure draws as a table, sizes in bytes, once it is asked for.
        key: names the chart in the session and in the names of the saved files.
        alt: the figure in words and numbers, for who can't see it.
        gestures: None: the chart is only looked at.
    """
    st.plotly_chart(
        figure,
        theme=None,
        key=key,
        alt=alt,
        config={"displaylogo": False, "modeBarButtonsToRemove": ["toImage", "lasso2d"]},
    )
    if gestures is not None:
        _listen(key, gestures)
    with st.container(horizontal=True, horizontal_alignment="right", gap="small"):
        st.download_button(
            "CSV",
            lambda: data().to_csv(index=False),
            file_name=f"memtrace-{key}.csv",
            mime="text/csv",
            key=f"{key} csv",
            on_click="ignore",
            type="tertiary",
            help="the chart's data, sizes in bytes",
        )
        _pictures(
            key=f"{key} pictures",
            data={"chart": key, "background": figure.layout.paper_bgcolor},
            width="content",
            height="content",
        )


def mark(chart: str, places: Mapping[str, float]) -> None:
    """A line through the chart of that key, at a place of each of these x axes (``xaxis2``).

    It moves without the chart being drawn, or sent, again.
    """
    _marks(key=f"{chart} marks", data={"chart": chart, "places": dict(places)}, height=0)


#: Nothing to see but the lines, which are part of the chart's SVG.
_marks = st.components.v2.component(
    "memtrace_marks",
    html="<span></span>",
    js="""
        const LINE = { class: "memtrace-mark", "stroke-width": 1.5, "stroke-dasharray": "2 2" };

        export default function ({ data }) {
            const place = `.st-key-${CSS.escape(data.chart)} .js-plotly-plot`;
            function draw(plot) {
                plot.querySelectorAll(`.${LINE.class}`).forEach((line) => line.remove());
                const { _fullLayout: layout } = plot;
                for (const [name, at] of Object.entries(data.places)) {
                    const x = layout[name];
                    const y = layout[x.anchor.replace("y", "yaxis")];
                    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
                    const across = x._offset + x.l2p(at);
                    const ends = { x1: across, x2: across, y1: y._offset };
                    ends.y2 = y._offset + y._length;
                    const look = { ...LINE, ...ends, stroke: layout.font.color };
                    for (const [key, value] of Object.entries(look)) line.setAttribute(key, value);
                    plot.querySelector(".main-svg .layer-above").append(line);
                }
            }
            let drawn;
            const again = () => draw(drawn);
            function attach() {
                const plot = document.querySelector(place);
                if (!plot?.on || plot === drawn) return;
                drawn = plot;
                plot.on("plotly_afterplot", again);
                if (plot._fullLayout?.xaxis?.l2p) again();
            }
            attach();
            const observer = new MutationObserver(attach);
            observer.observe(document.body, { childList: true, subtree: true });
            return () => {
                observer.disconnect();
                drawn?.removeListener("plotly_afterplot", again);
            };
        }
    """,
)


def _listen(chart: str, gestures: Gestures) -> None:
    """Call ``gestures`` for what the reader does in the chart of that key."""
    key = f"{chart} gestures"

    def made(name: str) -> Any:
        return st.session_state[key][name]

    _gestures(
        key=key,
        data={"chart": chart},
        height=0,
        on_click_change=lambda: gestures.click(made("click")),
        on_span_change=lambda: gestures.span(*made("span")),
        on_whole_change=gestures.whole,
    )


#: Nothing to see. Streamlit's own selection of a chart sends every point in a box, knows no click
#: on a line, and forgets a double click once the chart was drawn anew.
_gestures = st.components.v2.component(
    "memtrace_gestures",
    html="<span></span>",
    js="""
        const DOUBLE = 250;  // milliseconds in which a second click may come

        export default function ({ data, setTriggerValue }) {
            const place = `.st-key-${CSS.escape(data.chart)} .js-plotly-plot`;
            let clicked;
            function attach() {
                const plot = document.querySelector(place);
                if (!plot?.on || plot.listens === setTriggerValue) return;
                plot.listens = setTriggerValue;
                plot.on("plotly_click", ({ points }) => {
                    clearTimeout(clicked);
                    const [{ x, customdata }] = points;
                    clicked = setTimeout(() => setTriggerValue("click", customdata ?? x), DOUBLE);
                });
                plot.on("plotly_selected", (selected) => {
                    const axis = Object.keys(selected?.range ?? {}).find((name) => name[0] === "x");
                    if (!axis) return;
                    setTriggerValue("span", selected.range[axis].toSorted((a, b) => a - b));
                });
                function whole() {
                    clearTimeout(clicked);
                    setTriggerValue("whole", true);
                }
                plot.on("plotly_deselect", whole);  // a double click while dragging selects
                plot.on("plotly_doubleclick", whole);
            }
            attach();
            const observer = new MutationObserver(attach);
            observer.observe(document.body, { childList: true, subtree: true });
            return () => observer.disconnect();
        }
    """,
)

#: Two buttons. A figure of Plotly is several layers of SVG, one over the other, and styled inline.
_pictures = st.components.v2.component(
    "memtrace_pictures",
    html="<button data-as='svg'>SVG</button><button data-as='png'>PNG</button>",
    css="""
        button {
            background: none; border: none; padding: 0 0.5rem; min-height: 2.5rem; cursor: pointer;
            color: var(--st-text-color); font: inherit; font-family: var(--st-font);
            font-size: 0.875rem;
        }
        button:hover, button:focus-visible { color: var(--st-primary-color); }
    """,
    js="""
        const SCALE = 2;  // pixels of a PNG in one of the screen

        function whole(plot, background) {
            const layers = [...plot.querySelectorAll("svg.main-svg")];
            const svg = layers[0].cloneNode(false);
            const { width, height } = layers[0].getBoundingClientRect();
            svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
            svg.setAttribute("width", width);
            svg.setAttribute("height", height);
            svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
            svg.style.background = background;
            for (const layer of layers) {
                svg.append(...layer.cloneNode(true).children);
            }
            svg.querySelectorAll(".hoverlayer, .drag").forEach((part) => part.remove());
            return { text: new XMLSerializer().serializeToString(svg), width, height };
        }

        function save(blob, name) {
            const link = document.createElement("a");
            link.href = URL.createObjectURL(blob);
            link.download = name;
            link.click();
            URL.revokeObjectURL(link.href);
        }

        function savePng(blob, name, width, height) {
            const image = new Image();
            image.onload = () => {
                const canvas = document.createElement("canvas");
                canvas.width = SCALE * width;
                canvas.height = SCALE * height;
                canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
                URL.revokeObjectURL(image.src);
                canvas.toBlob((png) => save(png, name));
            };
            image.src = URL.createObjectURL(blob);
        }

        export default function ({ data, parentElement }) {
            for (const button of parentElement.querySelectorAll("button")) {
                const kind = button.dataset.as;
                const name = `memtrace-${data.chart}.${kind}`;
                button.setAttribute("aria-label", `Save the chart as ${kind.toUpperCase()}`);
                button.onclick = () => {
                    const place = `.st-key-${CSS.escape(data.chart)} .js-plotly-plot`;
                    const { text, width, height } =
                        whole(document.querySelector(place), data.background);
                    const blob = new Blob([text], { type: "image/svg+xml" });
                    if (kind === "svg") save(blob, name);
                    else savePng(blob, name, width, height);
                };
            }
        }
    """,
)


def link(label: str, path: str, query: Mapping[str, str | list[str]]) -> None:
    """A link to the page with this ``PATH``, at an address with ``query``."""
    page = st.Page(_nothing, url_path=path)  # pages of one path are one page
    st.page_link(page, label=label, query_params=query)


def _nothing() -> None:
    """Never called: the page is there already."""


#: By what Markdown knows an address that nothing marks as one, in escaped text.
_ADDRESS = re.compile(r"\\:(?=//)|(?<=www)\.|@", re.IGNORECASE)


def escaped(text: str) -> str:
    """Names in a trace are text, not Markdown; nor links, which no backslash would prevent."""
    signs = (f"\\{sign}" if sign in r"\`*_{}[]<>()#+|~$:&" else sign for sign in visible(text))
    return _ADDRESS.sub(r":color[\g<0>]{}", "".join(signs))  # a part of no colour of its own


def table(frame: pd.DataFrame) -> None:
    """A small table as HTML, which a screen reader reads; its cells would else be Markdown."""
    st.table(frame.map(escaped).rename(index=escaped, columns=escaped))
