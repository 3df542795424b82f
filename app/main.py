"""What ``memtrace view`` hands to Streamlit: the page, for the runs on the command line."""

import sys

from app.page import page

page(sys.argv[1:])
