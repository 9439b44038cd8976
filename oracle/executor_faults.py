"""Seeded faults of what executes: the virtual-time loop, the fetch threads, the readable engine.

They are found in the logs of runs that the shipped scheduler drives (`oracle/rigs.py`), those of
the engine in what requests get in other company (`oracle/company_rig.py`).
"""

from __future__ import annotations

from oracle.patching import Mutant

LOOP, TRANSFER = "reference.simulator.loop", "jax_impl.transfer"
EXECUTOR, ENGINE = "reference.executor", "reference.engine"
LOADED = "return [Loaded(action.ticket, nanoseconds(self.costs.transfer(self.expert_bytes)))]"


def _m(name: str, module: str, old: str, new: str, declared: str) -> Mutant:
    return Mutant(name, module, old, new, declared)


EXECUTOR_MUTANTS: tuple[Mutant, ...] = (
    # The virtual-time loop, rig "loop".
    _m("completion-dropped", LOOP, LOADED, "return []", "S11"),
    _m("completion-twice", LOOP, LOADED, LOADED + " * 2", "S3"),
    _m(
        "written-to-wrong-slot",
        LOOP,
        "self.executor.fill(action)",
        "self.executor.fill(Load(action.ticket, action.key, 0))",
        "S9",
    ),
    _m(
        "failed-read-told-as-loaded",
        LOOP,
        "return [LoadFailed(action.ticket, str(error))]",
        LOADED,
        "S9",
    ),
    _m(
        "computed-told-early",
        LOOP,
        "self.at(self.now + seconds, lambda: self._computed(action, seconds))",
        "self.at(self.now, lambda: self._computed(action, seconds))",
        "S9",
    ),
    _m("late-write-told-as-drained", LOOP, "fault.error, drained=False)", "fault.error)", "S11"),
    _m(
        "channel-never-idle-again",
        LOOP,
        "self.outstanding -= 1\n        if fault is not None:",
        "if fault is not None:",
        "S11",
    ),
    _m(
        "lane-never-idle-again",
        LOOP,
        "had one been given away, it would show.\n        self.computing = False",
        "",
        "S11",
    ),
    _m(
        "results-dropped",
        LOOP,
        "end, *rest = self.executor.run(action)",
        "end, *rest = self.executor.run(action)[:1]",
        "S1",
    ),
    # The readable engine, rig "engine".
    _m(
        "cancel-blanks-neighbours",
        EXECUTOR,
        "        handle = self.handles.pop(action.request)\n",
        "        handle = self.handles.pop(action.request)\n"
        "        for text in self.texts.values():\n"
        "            text.tokens[-1] *= getattr(action, 'reason', '') != 'cancelled'\n",
        "S12",
    ),
    _m(
        "seed-of-the-seat",
        EXECUTOR,
        "choose(logits[-1], text.handle.sampling,",
        "choose(logits[-1], __import__('dataclasses').replace("
        "text.handle.sampling, seed=number),",
        "S13",
    ),
    _m(
        "outputs-in-order-of-coming",
        EXECUTOR,
        "            text.outputs[row, rank] = ",
        "            rank = np.isfinite(text.outputs[row, :, 0]).sum()\n"
        "            text.outputs[row, rank] = ",
        "S13",
    ),
    _m(
        "length-known-beforehand",
        ENGINE,
        "Arrived(handle.number, len(request.prompt), request.max_new_tokens)",
        "Arrived(handle.number, len(request.prompt), min(2, request.max_new_tokens))",
        "S14",
    ),
    _m(
        "failure-blames-all",
        EXECUTOR,
        "Failed(action.step, error, tuple(failed))",
        "Failed(action.step, error)",
        "S15",
    ),
    # The fetch threads, rig "transfer".
    _m(
        "thread-writes-wrong-slot",
        TRANSFER,
        "view = self._pool.view(job.slot)",
        "view = self._pool.view(0)",
        "S9",
    ),
    _m(
        "thread-hides-failure",
        TRANSFER,
        "return self._told(job, str(error), True)",
        "return self._told(job, None, True)",
        "S9",
    ),
    _m(
        "thread-drops-failure",
        TRANSFER,
        "            self._post(done)\n",
        "            done.error or self._post(done)\n",
        "S11",
    ),
    _m(
        "thread-tells-twice",
        TRANSFER,
        "            self._post(done)\n",
        "            self._post(done) or self._post(done)\n",
        "S3",
    ),
    _m(
        "thread-names-old-ticket",
        TRANSFER,
        "            job.ticket, job.key, job.slot, ",
        "            max(1, job.ticket - 1), job.key, job.slot, ",
        "S3",
    ),
)
