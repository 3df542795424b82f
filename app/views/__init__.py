"""The pages, in the order of the navigation; the first is what opens. ``app`` says what one is."""

from app.views import allocations, fragmentation, overview, plan, requests, timeline, what_if

ALL = (overview, timeline, fragmentation, requests, allocations, what_if, plan)
#: Those that show a run of which no allocation was booked, too.
WITHOUT_EVENTS = (requests, plan)
#: Those that show something without any run.
WITHOUT_RUNS = (plan,)
