"""The pages, in the order of the navigation; the first is what opens. ``app`` says what one is."""

from app.views import allocations, fragmentation, overview, timeline

ALL = (overview, timeline, fragmentation, allocations)
