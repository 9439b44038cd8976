"""Decide: the pure control plane. Events in, actions out; no clock, thread, I/O, chance or array.

Read scheduler.py first (the two calls), then lifecycle.py (what events do), fetch.py (what to read
next), grouping.py (what to run next), cache.py (slots) and requests.py (one request's state).
"""

from reference.control.scheduler import Scheduler

__all__ = ["Scheduler"]
