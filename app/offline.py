"""``memtrace export --to html``: one page that needs no server, no network and no other file.

The charts are those of the viewer, drawn once in signs that stand for the colours of a
:class:`~app.figures.style.Look`; the page puts in those that the reader prefers, light or dark.
"""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from string import Template

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from app import frames, frames_fragmentation
from app.figures import fragmentation, timeline, waterfall
from app.figures.style import DARK, LIGHT, Look
from app.figures.timeline import Panel, Scale
from memtrace.analysis.alignment import by_time
from memtrace.analysis.compare import Comparison, compare
from memtrace.analysis.steps import KINDS, steps
from memtrace.analysis.summary import Summary
from memtrace.errors import MemtraceError

_TOP = 10  # allocations that are listed
#: No chart uses these colours: each stands for one of a look.
_SIGNS = Look(*(f"#01020{number}" for number, _ in enumerate(fields(Look))))


def page(summaries: Sequence[Summary]) -> str:
    """The overview, the timelines and the segments of the runs, as HTML.

    Raises:
        MemtraceError: no run saw a tensor.
    """
    comparison = compare([one for one in summaries if one.primary is not None] or _nothing())
    names = [side.name for side in comparison.sides]
    parts = [
        *_notes(summaries, comparison),
        *_overview(comparison),
        *_timelines(comparison),
        *_fragmentation(comparison),
        *_recordings(comparison),
    ]
    return _PAGE.substitute(
        title=html.escape(", ".join(names)),
        plotly=get_plotlyjs(),
        looks=json.dumps({"light": _colours(LIGHT), "dark": _colours(DARK)}),
        light=_variables(LIGHT),
        dark=_variables(DARK),
        parts="\n".join(parts),
    )


def _nothing() -> Sequence[Summary]:
    raise MemtraceError("no allocation was booked, so there is nothing to draw")


def _colours(look: Look) -> Mapping[str, str]:
    """By sign."""
    colours = asdict(look)
    return {sign: colours[name] for name, sign in asdict(_SIGNS).items()}


def _variables(look: Look) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in asdict(look).items())


def _notes(summaries: Sequence[Summary], comparison: Comparison) -> Iterator[str]:
    """What is to be known first, and what isn't here."""
    yield _list("verdicts", comparison.verdicts)
    warnings = list(comparison.warnings)
    for side in comparison.sides:
        warnings += [
            f"{side.name} ran out of memory: {oom.verdict}" for oom in side.summary.ooms[-1:]
        ]
        if (more := len(side.summary.accounts) - 1) > 0:
            shown = f"{side.account.device} of process {side.account.pid}"
            warnings.append(
                f"{side.name}: of its {more + 1} devices and processes {shown} is shown."
            )
    warnings += [
        f"No allocation was booked of {one.name}, so it isn't shown here."
        for one in summaries
        if one.primary is None
    ]
    yield _list("warnings", warnings)


def _overview(comparison: Comparison) -> Iterator[str]:
    yield _heading("The equation, at the peak of allocated")
    yield _chart(
        "equation", waterfall.waterfall(comparison, _SIGNS), waterfall.describe(comparison)
    )
    places = (f"{side.name} peaks {side.account.place.within}." for side in comparison.sides)
    yield _text(" ".join(places))
    yield _beside(
        _heading("At the peak of allocated") + _table(frames.equations(comparison, own=False)),
        _heading("Each one's own peak") + _table(frames.equations(comparison, own=True)),
    )
    yield _heading("Live at the peak")
    yield _beside(
        *(
            _text(side.name)
            + _table(frames.allocations(side.account.top[:_TOP]).set_index("component"))
            for side in comparison.sides
        )
    )


def _timelines(comparison: Comparison) -> Iterator[str]:
    yield _heading("Timeline")
    axes = [
        by_time(*(int(side.account.account.time_us[end]) for end in (0, -1)))
        for side in comparison.sides
    ]
    view = (min(axis.at[0] for axis in axes), max(axis.at[-1] for axis in axes))
    scale = Scale("seconds since the run began", view)
    panels = [
        Panel.of(
            side.name,
            side.account,
            axis,
            scale,
            [steps(side.account.account, kind) for kind in KINDS],
        )
        for side, axis in zip(comparison.sides, axes, strict=True)
    ]
    words = " ".join(map(timeline.describe, panels))
    figure = timeline.timelines(panels, scale, _SIGNS).update_layout(dragmode="zoom")
    yield _chart("timeline", figure, words)
    events = " and ".join(f"{panel.timeline.total_events:,}" for panel in panels)
    yield _text(
        f"Of {events} events the highest in each 1/{timeline.SPANS} of the time is drawn, the peak "
        f"exactly. {words}"
    )


def _fragmentation(comparison: Comparison) -> Iterator[str]:
    yield _heading("Segments")
    looked = [
        (side.account, fragmentation.History.of(side.name, side.account.account))
        for side in comparison.sides
    ]
    found = [(account, one) for account, one in looked if one is not None]
    shown = {one.name for _, one in found}
    without = [side.name for side in comparison.sides if side.name not in shown]
    if without:
        yield _text(
            f"No segments were recorded of {' and '.join(without)}: only the caching allocator of "
            "a GPU has them."
        )
    if not found:
        return
    instants = [
        fragmentation.Instant.of(one.name, account.account, one.course.stops[one.telling])
        for account, one in found
    ]
    words = " ".join(map(fragmentation.describe, instants))
    row = fragmentation.row_bytes(max(account.reserved_peak or 0 for account, _ in found))
    yield _chart("segments", fragmentation.segment_map(instants, row, _SIGNS), words)
    yield _text(words)
    yield _table(frames_fragmentation.unused(instants))
    yield _heading("Segments over time")
    histories = [one for _, one in found]
    telling = [one.telling for one in histories]
    words = " ".join(map(fragmentation.describe_course, histories))
    yield _chart("unused", fragmentation.over_time(histories, _SIGNS, telling), words)
    yield _text(words)


def _recordings(comparison: Comparison) -> Iterator[str]:
    yield _heading("What was recorded")
    yield _table(frames.recordings(comparison))
    for side in comparison.sides:
        unseen = sorted({text for one in side.summary.processes for text in one.unseen})
        if unseen:
            yield _text(f"What was not seen of {side.name}:")
            yield _list("unseen", unseen)


# -- HTML ------------------------------------------------------------------------------------------


def _heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def _text(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _list(kind: str, texts: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    return f'<ul class="{kind}">{items}</ul>' if texts else ""


def _table(frame: pd.DataFrame) -> str:
    return f'<div class="table">{frame.to_html(border=0, escape=True, index_names=False)}</div>'


def _beside(*parts: str) -> str:
    sections = "".join(f"<section>{part}</section>" for part in parts)
    return f'<div class="beside">{sections}</div>'


def _chart(key: str, figure: go.Figure, words: str) -> str:
    """A figure as data; the page's script draws it into the empty box."""
    data = figure.to_json().replace("<", "\\u003c")  # a name may hold an end tag
    return (
        f'<figure id="{key}"><div role="img" aria-label="{html.escape(words)}"></div>'
        f'<script type="application/json">{data}</script></figure>'
    )


#: The policy keeps a browser from loading anything, whatever a trace may hold.
_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">
<meta name="color-scheme" content="light dark">
<title>memtrace: $title</title>
<style>
:root { $light }
@media (prefers-color-scheme: dark) { :root { $dark } }
body {
  margin: 0 auto; padding: 1rem 2rem; max-width: 1800px;
  background: var(--background); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
}
h1, h2 { font-weight: 600; }
figure { margin: 1rem 0; }
.warnings { border-left: 4px solid var(--accent); padding: 0.5rem 2rem; }
.beside { display: flex; flex-wrap: wrap; column-gap: 3rem; }
.beside section { max-width: 100%; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--grid); padding: 0.2rem 1.2rem 0.2rem 0; text-align: left; }
th { font-weight: 500; white-space: nowrap; }
</style>
<script>$plotly</script>
</head>
<body>
<h1>$title</h1>
$parts
<script>
const LOOKS = $looks;
const dark = matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const look = dark.matches ? LOOKS.dark : LOOKS.light;
  for (const figure of document.querySelectorAll("figure")) {
    const [box, source] = figure.children;
    let text = source.textContent;
    for (const [sign, colour] of Object.entries(look)) text = text.replaceAll(sign, colour);
    const { data, layout } = JSON.parse(text);
    const filename = "memtrace-" + figure.id;
    Plotly.react(box, data, layout, {
      responsive: true,
      displaylogo: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d"],
      toImageButtonOptions: { format: "svg", filename },
      modeBarButtonsToAdd: [{
        name: "Download plot as a PNG",
        icon: Plotly.Icons.camera,
        click: (plot) => Plotly.downloadImage(plot, { format: "png", scale: 2, filename }),
      }],
    });
  }
}
dark.addEventListener("change", draw);
draw();
</script>
</body>
</html>
""")
