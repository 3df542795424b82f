"""One module a sub-command: ``NAME``, ``HELP``, ``configure(parser)`` and ``run(args) -> int``.

They import nothing heavy at the top, so that ``memtrace --help`` answers at once.
"""
