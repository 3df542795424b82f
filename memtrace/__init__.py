"""memtrace: where each byte of a PyTorch program goes.

PYTEST_DONT_REWRITE: a recorded pytest has imported this package before its plugins are set up, and
would warn that it can't rewrite our asserts.
"""

__version__ = "0.1.0"
