"""Lamina, to be read: attention in one pool, everything else in another.

Read merge.py (why attention can be cut into parts), devices.py (what a memory device does),
model.py (a forward pass whose keys and values are elsewhere) and handoff.py (how a prompt's get
there). What decides, without arrays, is in reference/control/attention_*.py.
"""
