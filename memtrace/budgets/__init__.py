"""Memory budgets of tests: what the pytest plugin does where a test asks for it.

    words      what a marker, a fixture or a configuration says, parsed
    recording  the recording of a test and the stretches of it that count
    verdicts   what was measured against what was allowed, and in words
    plateau    the same for memory that stays put over requests
    store      measurements kept for later: baselines of the session, saved ones
    running    the hooks around a test
    dry        the same for a test on a card that isn't there, which dry_child runs
    fitting    what such a test lacked
    reporting  the hooks around its report

pytest itself imports :mod:`memtrace.pytest_plugin` alone, which imports the rest once a test asks.
"""
