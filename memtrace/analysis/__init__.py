"""Pure functions from a trace to a table.

``accounts`` books the events as step functions, ``places`` reads the scope tree, and the rest
asks them: ``peaks``, ``timeline``, ``identities``, ``summary`` (one run) and ``compare`` (several).
"""
