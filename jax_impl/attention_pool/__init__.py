"""Lamina on JAX devices: attention in a memory pool, everything else in a compute pool.

converter.py cuts a jaxpr at its attention operators (flat.py, cuts.py, mincut.py).
"""
