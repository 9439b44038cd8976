"""What attention offloading costs, by rooflines and in virtual time.

hardware.py and workloads.py are data with sources; costs.py the rooflines; tables.py what the paper
tells, computed again; serving.py a trace served with paged KV; pipeline.py the rotation played in
virtual time; plan.py the search for pool sizes.
"""
