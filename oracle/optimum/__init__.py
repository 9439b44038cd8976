"""The best that could be done, by exhaustive search, in worlds small enough (OPT-1 to OPT-3).

small.py says what a small world is and runs the shipped schedulers in it; clairvoyant.py finds the
least makespan for given routes; causal.py the least expected makespan of any policy that knows the
routes only as routers tell them.
"""
