"""memtrace: where each byte of a PyTorch program goes."""

__version__ = "0.1.0"
