"""Lamina on JAX devices: attention in a memory pool, everything else in a compute pool.

memory.py is a memory device, compute.py a replica, prefill.py a prefill worker, pieces.py the
programs of a layer parted at its attention, wire.py what is sent, recorded.py the event log.
model.py puts the two under the ordinary engine; engine.py, loop.py and worker.py are the rotation.
converter.py cuts anybody's jaxpr at its attentions (flat.py, cuts.py, mincut.py), function.py runs
what it gave. A process boundary would go into wire.py and messages.py.
"""
