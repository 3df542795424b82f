"""Dry runs of prefills on cards that aren't there: ``tidekv plan``."""
