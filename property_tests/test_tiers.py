"""Disk, host memory, device: the host tier's bookkeeping, its bytes, and what may not show."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import engines
import jax
import numpy as np
import pytest
from engines import CROWD, LIMIT_S, MINIMUM, alone, checkpoint, events, opened, results_of, same

from jax_impl import host_stage
from jax_impl.app.main import main
from jax_impl.backend import aligned, backend
from jax_impl.engine import JaxEngine
from jax_impl.fault_readers import ControlledReader, FaultyReader
from jax_impl.host_stage import HostStage, way_of
from oracle.checkers import check_log
from reference.control.host_tier import HostTier
from reference.vocab.errors import BadInput, BudgetTooSmall, IllegalEvent
from reference.vocab.ids import ExpertKey

SLOT = MINIMUM // 2
"""Bytes of one expert of the tiny checkpoint, which has 24."""
K = ExpertKey


class Obvious:
    """The tier as anyone would write it: one list in order of use, searched from its beginning."""

    def __init__(self, entries: int, layers: int, per_layer: bool) -> None:
        self.entries, self.per_layer = entries, per_layer
        self.share = max(1, entries // layers)
        self.ready: list[ExpertKey] = []
        self.filling: dict[int, ExpertKey] = {}
        self.reading: dict[int, ExpertKey] = {}
        self.condemned: dict[int, ExpertKey] = {}
        self.late: set[int] = set()

    def pinned(self) -> int:
        return len(self.filling) + len(set(self.reading.values())) + len(
            set(self.condemned.values()))  # fmt: skip

    def used(self) -> int:
        return len(self.filling) + len(self.ready) + len(set(self.condemned.values()))

    def begin(self, ticket: int, key: ExpertKey) -> bool:
        if key in self.ready:
            self.use(key)
            self.reading[ticket] = key
            return True
        if self.used() == self.entries:
            self.ready.remove(self.victim(key.layer))
        self.filling[ticket] = key
        return False

    def victim(self, layer: int) -> ExpertKey:
        idle = [k for k in self.ready if k not in self.reading.values()]
        if self.per_layer:
            crowd = {la: sum(k.layer == la for k in self.ready) for la in range(9)}
            turn = sorted(crowd, key=lambda la: (-crowd[la], la))
            if crowd[layer] >= self.share:
                turn.insert(0, layer)
            idle.sort(key=lambda k: turn.index(k.layer))
        return idle[0]

    def use(self, key: ExpertKey) -> None:
        if key in self.ready:
            self.ready.remove(key)
            self.ready.append(key)

    def end(self, ticket: int, ok: bool) -> None:
        if ticket in self.filling:
            key = self.filling.pop(ticket)
            if ok and ticket not in self.late and key not in self.ready:
                self.ready.append(key)
        elif ticket in self.condemned:
            del self.condemned[ticket]
        else:
            key = self.reading.pop(ticket)
            if not ok:
                self.ready.remove(key)
                for other in [t for t, k in self.reading.items() if k == key]:
                    self.condemned[other] = self.reading.pop(other)


def games(seed: int, entries: int, per_layer: bool, moves: int) -> Iterator[tuple[Any, ...]]:
    """Random legal moves, each done to a tier and to the obvious one: (tier, obvious, what)."""
    rng = random.Random(seed)
    tier = HostTier(entries, 3, "per-layer" if per_layer else "global")
    plain = Obvious(entries, 3, per_layer)
    ticket, open_ = 0, []
    for _ in range(moves):
        key = K(rng.randrange(3), rng.randrange(4))
        move = rng.choice(["begin", "begin", "end", "use", "overdue"])
        if move == "begin" and tier.available:
            ticket += 1
            # Condemned bytes of the same expert count once a set of readers in the plain model.
            if key in plain.condemned.values():
                continue
            hit = plain.begin(ticket, key)
            assert tier.begin(ticket, key).hit == hit
            open_.append(ticket)
        elif move == "end" and open_:
            done = open_.pop(rng.randrange(len(open_)))
            ok = rng.random() < 0.8
            plain.end(done, ok)
            tier.end(done, ok)
        elif move == "use":
            plain.use(key)
            tier.use(key)
        elif move == "overdue" and open_:
            late = rng.choice(open_)
            plain.late.add(late)
            tier.overdue(late)
        yield tier, plain, open_


@pytest.mark.rule("TIER-2", "TIER-3", "TIER-4", "TIER-5", "TIER-6")
@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("entries", [1, 2, 3, 5, 8])
def test_the_tier_does_what_the_obvious_one_does(entries: int, per_layer: bool) -> None:
    hits = evictions = 0
    for seed in range(12):
        before: dict[int, ExpertKey | None] = {}
        for tier, plain, open_ in games(seed, entries, per_layer, 150):
            found = list(tier.contents())
            assert {k for k, _ in found} == set(plain.ready)
            for layer in range(3):
                mine = [k for k, _ in found if k.layer == layer]
                assert mine == [k for k in plain.ready if k.layer == layer]
            assert tier.available == entries - plain.pinned()
            assert plain.used() <= entries and len(found) <= entries
            # What a load in flight has pinned is there, unchanged, until it ends (TIER-2).
            now = {t: tier.keys[tier.loads[t].number] for t in open_}
            assert all(now[t] == before[t] for t in now if t in before)
            hits += sum(load.hit for load in tier.loads.values())
            evictions += plain.used() == entries
            before = now
        copied = tier.copy()
        key = tier.key()
        for ticket in list(tier.loads):
            tier.end(ticket, True)
        assert copied.key() == key and len(copied.loads) == len(open_)
        assert not tier.loads and tier.available == entries
    assert hits and evictions


@pytest.mark.rule("TIER-2", "TIER-3")
def test_equal_keys_are_states_that_go_on_alike() -> None:
    seen: dict[tuple, HostTier] = {}
    met = 0
    for seed in range(40):
        for tier, _, _ in games(seed, 2, True, 60):
            mine = seen.setdefault(tier.key(), tier.copy())
            met += mine.available > 0
            for wanted in (K(0, 0), K(1, 3), K(2, 2)):
                a, b = mine.copy(), tier.copy()
                if not a.available:
                    continue
                assert a.begin(10_000, wanted).hit == b.begin(10_000, wanted).hit
                assert a.key() == b.key()
                for x in (a, b):
                    x.end(10_000, True)
                assert a.key() == b.key()
    assert met > 500


@pytest.mark.rule("TIER-2")
def test_a_broken_protocol_is_told() -> None:
    tier = HostTier(1, 1)
    tier.begin(1, K(0, 0))
    for wrong in (
        lambda: tier.begin(1, K(0, 0)), lambda: tier.begin(2, K(0, 0)),
        lambda: tier.end(3, True), lambda: tier.overdue(3),
    ):  # fmt: skip
        with pytest.raises(IllegalEvent):
            wrong()
    assert tier.available == 0
    tier.end(1, True)
    assert tier.begin(2, K(0, 0)).hit
    roomy = HostTier(2, 1)
    roomy.begin(1, K(0, 0))
    with pytest.raises(IllegalEvent, match="begun already"):
        roomy.begin(1, K(0, 1))


def replayed(engine: JaxEngine) -> None:
    """TIER-7: the log's lines, given to a new tier, name the same entries and sources."""
    head, *records = engine.records
    tier = HostTier(
        head["host_slots"], len(head["options"]["layers"]), head["options"]["eviction"]
    )
    slots: dict[int, ExpertKey] = {}
    flying: dict[int, tuple[ExpertKey, int]] = {}
    read = there = hits = 0
    for r in records:
        name = r.get("event") or r.get("action")
        if name == "Load":
            key = ExpertKey(*r["key"])
            if r["slot"] in slots:
                tier.use(slots.pop(r["slot"]))
            entry = tier.begin(r["ticket"], key)
            assert (entry.number, entry.hit) == (r["entry"], r["from"] == "host")
            assert r["disk_bytes"] == (0 if entry.hit else r["bytes"])
            flying[r["ticket"]] = key, r["slot"]
            if not r["guess"]:
                read, there, hits = read + r["disk_bytes"], there + r["bytes"], hits + entry.hit
        elif name == "LoadFailed" and not r["drained"]:
            tier.overdue(r["ticket"])
        elif name in ("Loaded", "LoadFailed"):
            key, slot = flying.pop(r["ticket"])
            if name == "Loaded":
                slots[slot] = key
            tier.end(r["ticket"], name == "Loaded")
    totals = engine.totals()
    if not events(engine, "LoadFailed"):
        assert (totals["disk_bytes"], totals["bytes"], totals["host_loads"]) == (read, there, hits)


@pytest.mark.rule("TIER-1", "TIER-7", "ENGINE-6")
@pytest.mark.parametrize(
    ("memory", "host", "more"),
    [
        (MINIMUM, SLOT, {}),
        (MINIMUM, 3 * SLOT, {"cache": "global", "scheduler": "lockstep"}),
        (MINIMUM, "50%", {"readiness": "expert", "io": "buffered"}),
        ("40%", "60%", {"threads": 2, "check": True}),
        ("40%", "100%", {"scheduler": "lockstep-blocking"}),
        ("60%", 2 * SLOT, {"cache": "global", "chunk": 8}),
    ],
)
def test_the_host_tier_changes_no_bit(memory: Any, host: Any, more: dict[str, Any]) -> None:
    with opened(memory=memory, host_memory=host, **more) as engine:
        results = results_of(engine, CROWD)
        totals = engine.totals()
    assert all(same(r, alone(a)) for r, a in zip(results, CROWD, strict=True))
    replayed(engine)
    entries = engine.sizes.host_slots
    assert entries * SLOT <= engine.sizes.host == totals["host_budget_bytes"]
    assert engine.sizes.total >= (entries + engine.sizes.slots) * SLOT
    assert engine.records[0]["host_budget_bytes"] == engine.sizes.host
    if host == "100%":
        assert totals["disk_bytes"] <= 24 * SLOT, "each expert is read from the disk once"
        assert f"{totals['host_loads']} found their expert in host memory" in engine.why()
    assert totals["bytes"] == totals["loads"] * SLOT


@pytest.mark.rule("TIER-7")
def test_without_a_host_tier_every_load_is_from_the_disk() -> None:
    with opened(memory=MINIMUM) as engine:
        results_of(engine, CROWD[:2])
    assert {r["from"] for r in events(engine, "Load")} == {"disk"}
    assert engine.totals()["disk_bytes"] == engine.totals()["bytes"]
    assert engine.sizes.host == engine.sizes.host_slots == 0
    assert "host memory" not in engine.why()


def misaligned(nbytes: int) -> np.ndarray:
    """Memory from which the CPU backend has to copy, as a device elsewhere has to."""
    return aligned(nbytes, 16)


@pytest.mark.rule("TIER-4", "TIER-8", "JAX-11")
@pytest.mark.parametrize("way", ["pinned", "copied", "pageable", "dma"])
def test_every_way_to_the_device_gives_the_bits(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    registered: list[int] = []
    seen = backend()
    if way == "copied":  # pinned arrays that are not the memory they were made from
        seen = replace(seen, pinned_in_place=False)
        monkeypatch.setattr(host_stage, "staging", misaligned)
    elif way == "pageable":
        seen = replace(seen, pinned=False)
    elif way == "dma":
        seen = replace(seen, dma_map=True)
        monkeypatch.setattr(
            host_stage, "register",
            lambda region: registered.append(len(region)) or registered.clear,
        )  # fmt: skip
    monkeypatch.setattr(host_stage, "backend", lambda: seen)
    with opened(memory=MINIMUM, host_memory="60%", check=True, io="buffered") as engine:
        host = engine._loop.transfers.host
        assert host is not None and host.way == engine.records[0]["host_way"]
        assert host.way == ("pinned" if way == "copied" else way)
        if way == "dma":
            assert registered == [len(host.pool.region)]
        results = results_of(engine, CROWD[:4])
        kinds = {
            a.sharding.memory_kind for r in engine._loop._held.residents.values() for a in r.handle
        }
        assert kinds == {"device"}
        pool = host.pool._bytes.ctypes.data
        assert not any(
            pool <= a.unsafe_buffer_pointer() < pool + len(host.pool.region)
            for r in engine._loop._held.residents.values() for a in r.handle
        ), "copies, not the entries themselves"  # fmt: skip
        assert engine.sizes.bounce == (4 * SLOT if way == "copied" else 0), "staging is counted"
    assert all(same(r, alone(a)) for r, a in zip(results, CROWD, strict=False))
    assert engine.totals()["host_loads"] and not events(engine, "LoadFailed")
    assert not registered, "what was registered was given back"


@pytest.mark.rule("TIER-1")
def test_a_device_that_cannot_read_host_memory_gets_a_way_for_each_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_stage, "backend", lambda: replace(backend(), zero_copy=0))
    with opened(memory="40%", check=True) as engine:
        results = results_of(engine, CROWD[:3])
    assert engine.sizes.host_slots == engine.options.threads
    assert all(same(r, alone(a)) for r, a in zip(results, CROWD, strict=False))
    replayed(engine)


@pytest.mark.rule("JAX-11", "TIER-8")
def test_the_way_follows_what_the_backend_was_seen_to_do() -> None:
    seen = backend()
    assert seen.pinned and seen.pinned_in_place and not seen.dma_map and seen.note == ""
    assert way_of(seen) == "pinned"
    assert way_of(replace(seen, dma_map=True)) == "dma"
    assert way_of(replace(seen, pinned=False)) == "pageable"


@pytest.mark.rule("TIER-4", "ENGINE-1")
def test_the_device_holds_no_more_experts_than_there_are_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[jax.Array]] = []
    most: list[int] = []
    real = HostStage.arrive

    def watched(self: HostStage, *args: Any) -> Any:
        arrived = real(self, *args)
        made.extend(weakref.ref(a) for a in arrived[0])
        most.append(sum(ref() is not None for ref in made))
        return arrived

    monkeypatch.setattr(HostStage, "arrive", watched)
    with opened(memory=MINIMUM + SLOT, host_memory="50%") as engine:
        results_of(engine, CROWD)
        # Steps that have ended and messages under way hold nothing that has been let go.
        assert len(most) > 50 and 3 < max(most) <= 3 * engine.sizes.slots


@pytest.mark.rule("TIER-5", "ENGINE-6", "ENGINE-7")
@pytest.mark.parametrize("fault", ["eio", "eof", "short"])
def test_faults_of_the_disk_leave_no_trace(fault: Any) -> None:
    reader = FaultyReader(fault, 0, armed=False)
    fired = 0
    with opened(
        memory=MINIMUM, host_memory=4 * SLOT, reader=reader, io="buffered", threads=2
    ) as engine:
        for nth in (1, 2, 3, 5, 8, 13, 21, 34):
            reader.arm(nth)
            results = results_of(engine, CROWD[:2])
            assert all(same(r, alone(a)) for r, a in zip(results, CROWD, strict=False)), nth
            fired += reader.fired
    assert fired
    failed = events(engine, "LoadFailed")
    assert bool(failed) == (fault != "short") and all(r["drained"] for r in failed)
    replayed(engine)


@pytest.mark.rule("TIER-4", "TIER-8", "ENGINE-7")
def test_a_copy_to_the_device_that_fails_is_a_failed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = HostStage._copy, []

    def sometimes(self: HostStage, *args: Any) -> Any:
        calls.append(1)
        if len(calls) % 7 == 0:
            raise MemoryError("no room on the device")
        return real(self, *args)

    monkeypatch.setattr(HostStage, "_copy", sometimes)
    with opened(memory=MINIMUM, host_memory="50%", retries=5) as engine:
        results = results_of(engine, CROWD)
    assert all(same(r, alone(a)) for r, a in zip(results, CROWD, strict=True))
    failed = events(engine, "LoadFailed")
    assert failed and all("no room on the device" in r["error"] for r in failed)
    sources = {r["ticket"]: r["from"] for r in events(engine, "Load")}
    assert {sources[r["ticket"]] for r in failed} == {"host", "disk"}
    replayed(engine)


@pytest.mark.rule("TIER-5", "XFER-7")
def test_an_entry_that_is_still_being_written_is_given_to_nobody() -> None:
    reader = ControlledReader(hold=lambda ticket, key: ticket == 1)
    with opened(memory="40%", host_memory=3 * SLOT, reader=reader, deadline_s=0.2) as engine:
        results = results_of(engine, CROWD[:3])
        assert all(same(r, alone(a)) for r, a in zip(results, CROWD, strict=False))
        assert [r["ticket"] for r in events(engine, "LoadFailed")] == [1]
        loads = events(engine, "Load")
        entry = loads[0]["entry"]
        assert all(r["entry"] != entry for r in loads[1:])
        reader.release(1)
        again = engine.submit(CROWD[4], logits=True).result(LIMIT_S)
        assert same(again, alone(CROWD[4]))
    later = events(engine, "Load")[len(loads):]
    assert any(r["entry"] == entry for r in later), "it came back"
    replayed(engine)


@pytest.mark.rule("TIER-6", "XFER-10")
def test_a_bit_that_flips_in_host_memory_is_seen_and_read_again() -> None:
    with opened(memory=MINIMUM, host_memory="100%", check=True) as engine:
        assert same(engine.submit(CROWD[0], logits=True).result(LIMIT_S), alone(CROWD[0]))
        host = engine._loop.transfers.host
        assert host is not None
        flipped = dict(host.tier.contents())
        for entry in flipped.values():
            host.pool.view(entry)[100] ^= 4
        again = engine.submit(CROWD[0], logits=True).result(LIMIT_S)
        assert same(again, alone(CROWD[0]))
    failed = events(engine, "LoadFailed")
    assert failed and all("changed since it was read" in r["error"] for r in failed)
    replayed(engine)


@pytest.mark.rule("TIER-1")
def test_budgets_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    for host, error, text in (
        (SLOT - 1, BudgetTooSmall, f"at least {SLOT // 1024}KiB"),
        ("many", BadInput, "not a number"),
        ("auto", BadInput, "not a number"),
    ):
        with pytest.raises(error, match=text):
            JaxEngine.open(checkpoint(), MINIMUM, host_memory=host, **engines.SMALL)
    asked = tmp_path / "r.jsonl"
    asked.write_text('{"id": "a", "prompt": [5, 6], "max_new_tokens": 2}\n')
    flags = ["run", str(checkpoint()), "--requests", str(asked), "--host-memory", "50%"]
    assert main([*flags, "--engine", "reference"]) == 2
    assert "--host-memory" in capsys.readouterr().err
    assert main([*flags, "--memory", "40%", "--check", "--quiet"]) == 0
    assert "found their expert in host memory" in capsys.readouterr().out


@pytest.mark.rule("SAFE-11")
def test_the_judge_sees_what_is_wrong_with_host_memory() -> None:
    with opened(memory=MINIMUM, host_memory=3 * SLOT, threads=2) as engine:
        results_of(engine, CROWD[:3])
    good = engine.records
    loads = [i for i, r in enumerate(good) if r.get("action") == "Load"]
    hit = next(i for i in loads if good[i]["from"] == "host")
    miss = loads[0]
    wrongs = {
        "budget": [(0, {"host_budget_bytes": 2 * SLOT})],
        "which holds": [(hit, {"entry": (good[hit]["entry"] + 1) % 3})],
        "from disk": [(miss, {"disk_bytes": 0})],
        "uses": [(loads[1], {"entry": good[miss]["entry"]})],
    }
    assert good[loads[1]]["from"] == "disk"
    for text, changes in wrongs.items():
        bad = [dict(r) for r in good]
        for at, change in changes:
            bad[at] |= change
        found = check_log(bad)
        assert found and {v.property for v in found} == {"S11"}
        assert any(text in v.text for v in found), (text, found[:3])
