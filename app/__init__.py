"""The viewer: reads traces, asks ``memtrace.analysis``, draws. It knows nothing of recording."""
