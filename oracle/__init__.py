"""The judge: it finds out whether an engine, or the control plane, is right.

Read checkers/ first (what every property means over an event log), then world.py and judge.py (the
environment and the truth), transitions.py and explorer.py (every state of a small world), scopes.py
(which worlds), faults.py and mutants.py (what must be noticed), swarm.py (beyond small worlds).
"""
