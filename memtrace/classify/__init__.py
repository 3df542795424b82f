"""A user's own rules: a finished trace with other components, decided from its own evidence."""
