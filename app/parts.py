"""What pages are made of: the one way to show a chart, a table and a text of a trace."""

from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app.figures.style import DARK, LIGHT, Look


def look() -> Look:
    """Light or dark, as the reader's browser or settings are."""
    return DARK if st.context.theme.type == "dark" else LIGHT


def chart(
    figure: go.Figure,
    data: Callable[[], pd.DataFrame],
    *,
    key: str,
    alt: str,
    on_select: Callable[[], None] | None = None,
) -> None:
    """Show a figure, with buttons that save its data as CSV and itself as SVG or PNG.

    Args:
        data: makes what the figure draws as a table, sizes in bytes, once it is asked for.
        key: names the chart in the session and in the names of the saved files.
        alt: the figure in words and numbers, for who can't see it.
        on_select: called when points or a box are selected, which ``st.session_state[key]`` has.
    """
    select = "ignore" if on_select is None else on_select
    st.plotly_chart(
        figure,
        theme=None,
        key=key,
        alt=alt,
        on_select=select,  # type: ignore[arg-type]
        selection_mode=("points", "box"),
        config={"displaylogo": False, "modeBarButtonsToRemove": ["toImage", "lasso2d"]},
    )
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


#: Two buttons. A figure of Plotly is several layers of SVG, one over the other, and styled inline.
_pictures = st.components.v2.component(
    "memtrace_pictures",
    html="<button data-as='svg'>SVG</button><button data-as='png'>PNG</button>",
    css="""
        button {
            background: none; border: none; padding: 0 0.5rem; min-height: 2.5rem; cursor: pointer;
            color: var(--st-text-color); font: inherit; font-family: var(--st-font);
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


def escaped(text: str) -> str:
    """Names in a trace are text, not Markdown."""
    return "".join(f"\\{sign}" if sign in r"\`*_{}[]<>()#+|~$:" else sign for sign in text)


def table(frame: pd.DataFrame) -> None:
    """A small table as HTML, which a screen reader reads; its cells would else be Markdown."""
    st.table(frame.map(escaped).rename(index=escaped, columns=escaped))
