"""The pages, in the order of the navigation; the first is what opens. ``app`` says what one is."""

from app.views import allocations, fragmentation, overview, timeline, what_if

ALL = (overview, timeline, fragmentation, allocations, what_if)
