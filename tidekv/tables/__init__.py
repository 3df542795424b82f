"""The paper's results beside ours: ``tidekv tables``."""
