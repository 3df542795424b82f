"""The viewer: reads traces, asks ``memtrace.analysis``, draws. It knows nothing of recording.

    __main__.py   the process that ``memtrace view`` becomes
    server.py     what it serves: Streamlit, told where it is
    main.py       what Streamlit runs: the choice of runs, the navigation, the page
    choice.py     which runs, devices and processes are shown (*subjects*), kept in the address
    load.py       runs, read once and shared by all sessions
    live.py       follows runs that are being recorded
    making.py     what readers make while they look, in processes of their own
    replays.py    runs that they made by replaying, shown like any other
    replaying.py  the process that makes one of these
    plans.py      runs and curves that ``tidekv plan`` makes for them
    offline.py    the same charts as one page without a server (``memtrace export --to html``)
    views/        one module a page
    figures/      pure functions from analysis to a Plotly figure; ``style.py`` is how all look
    frames*.py    pure functions from analysis to a table
    parts.py      what pages are made of: the one way to show a chart, a table, a text of a trace

A page is a module in ``views/`` with ``TITLE``, ``PATH`` (its part of the address) and
``draw(subjects)``, listed in ``views/__init__.py``. ``draw`` gets one subject or more, each of
which saw a tensor, or in pages of ``views.WITHOUT_EVENTS`` at least answered requests; it shows
charts by ``parts.chart`` and tables by ``parts.table``, and keeps what a link should carry in
widgets with ``bind="query-params"``. What takes long is made once:

    @st.cache_resource(max_entries=MOST, hash_funcs=BY_SUBJECT, show_spinner=False)
    def found(subject: Subject) -> …

What a reader changes often (a slider, a selection) and what it redraws belong in one
``@st.fragment``. Nothing is fetched from another host: no icons, no fonts. A page's tests open it
by ``tests.app.opening``.
"""
