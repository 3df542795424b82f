"""Record a live process."""
