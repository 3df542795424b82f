"""One exception type for everything a user can get wrong."""


class MemtraceError(Exception):
    """A problem with the input, said in one sentence; the CLI prints it and exits."""

    exit_code = 1


class TraceError(MemtraceError):
    """A trace that is missing, foreign, truncated, damaged or newer than this version."""
