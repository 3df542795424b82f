"""The trace: the only thing that passes between makers and readers.

Here are the names that stand on disk. A recorded process that never imports torch needs no more
than these, so this module imports nothing.
"""

#: Version of the tables and manifests (:mod:`memtrace.trace.schema`). A reader refuses a newer one.
SCHEMA = 2
FORMAT = "memtrace"
MANIFEST = "manifest.json"
SUFFIX = ".memtrace"
