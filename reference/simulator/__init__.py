"""Virtual time: the same scheduler, with durations instead of devices.

costs.py says how long things take, loop.py lets them happen in order, routes.py stands in for a
model where only the routing matters.
"""
