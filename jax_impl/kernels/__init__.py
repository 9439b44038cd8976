"""Kernels, one ladder an operation: v0 is the obvious form, later rungs are faster.

Each rung says what it equals: the bits of the rung below, or its value within a stated error.
Every kernel is traced inside a jit of fixed shapes; none reduces across rows.
"""
