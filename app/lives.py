"""When each allocation of a subject lived: found once, for all pages and sessions."""

import streamlit as st

from app.load import BY_SUBJECT, MOST, Subject
from memtrace.analysis.lifetimes import Lifetimes, lifetimes


@st.cache_resource(max_entries=MOST, hash_funcs=BY_SUBJECT, show_spinner="Matching frees")
def lives_of(subject: Subject) -> Lifetimes:
    """Twelve bytes an allocation."""
    return lifetimes(subject.account.account)
