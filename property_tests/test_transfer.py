"""Slots and transfers against real files: bytes, alignment, faults, deadlines, order."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_impl import slots
from jax_impl.fault_readers import ControlledReader, FaultyReader
from jax_impl.readers import FileReader, Reader, ThrottledReader
from jax_impl.slots import SlotPool, layout
from jax_impl.spans import BOUNCE_MAX, Io, OpenFiles, bounce_size, plan
from jax_impl.transfer import Transferred, Transfers
from reference.files.budget import ALIGN, PAGE, slot_size
from reference.files.safetensors_header import TensorRef
from reference.vocab.errors import BadInput, Unsupported
from reference.vocab.ids import ExpertKey

EXPERTS = 6
SHAPES = ((24, 20), (24, 20), (20, 24))
BOTH: list[Io] = ["direct", "buffered"]


class Shard:
    """A file of odd-sized experts after a header of odd length, and what they should read as."""

    def __init__(self, folder: Path, dtype: str = "F32", apart: int = 0) -> None:
        self.path = folder / "shard.safetensors"
        self.refs: dict[ExpertKey, tuple[TensorRef, ...]] = {}
        self.bits: dict[ExpertKey, list[np.ndarray]] = {}
        rng = np.random.Generator(np.random.PCG64(7))
        item = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16}[dtype]
        data = bytearray(rng.bytes(1237))
        for e in range(EXPERTS):
            key, refs, arrays = ExpertKey(e % 2, e // 2), [], []
            for shape in SHAPES:
                array = rng.integers(0, 1 << 14, shape).astype(item)
                refs.append(TensorRef(self.path, len(data), array.nbytes, dtype, shape))
                arrays.append(array)
                data += array.tobytes() + rng.bytes(apart)
            self.refs[key], self.bits[key] = tuple(refs), arrays
        self.path.write_bytes(data)

    def good(self, done: Transferred) -> bool:
        """The arrays of the transfer hold exactly the file's bits."""
        return len(done.handle) == len(SHAPES) and all(
            np.asarray(a).tobytes() == b.tobytes()
            for a, b in zip(done.handle, self.bits[done.key], strict=True)
        )


class Bench:
    """A pool with transfers over one shard, and the completions that they told."""

    def __init__(self, shard: Shard, slots: int = 3, **options: object) -> None:
        self.told: queue.Queue[Transferred] = queue.Queue()
        self.pool = SlotPool(slots, slot_size(shard.refs.values()))
        self.transfers = Transfers(
            self.pool, shard.refs.__getitem__, shard.refs, self.told.put, **options  # type: ignore[arg-type]
        )  # fmt: skip

    def load(self, ticket: int, key: ExpertKey, slot: int = 0) -> Transferred:
        self.transfers.start(ticket, key, slot)
        return self.next()

    def next(self, timeout: float = 10.0) -> Transferred:
        return self.told.get(timeout=timeout)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path)


@pytest.fixture
def bench(shard: Shard) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: object) -> Bench:
        made.append(Bench(shard, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for b in made:
        assert b.transfers.close(), "a fetch thread did not come back"


@pytest.mark.rule("XFER-1", "ENGINE-2")
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_tensors_lie_on_64_bytes_without_overlap(tmp_path: Path, dtype: str) -> None:
    refs = Shard(tmp_path, dtype).refs
    for group in refs.values():
        places = layout(group)
        assert [p.offset % ALIGN for p in places] == [0, 0, 0]
        ends = [p.offset + p.nbytes for p in places]
        assert all(a <= b.offset < a + ALIGN for a, b in zip(ends, places[1:], strict=False))
        assert slot_size([group]) - ends[-1] in range(ALIGN)
    big = TensorRef(Path("x"), 0, (1 << 20) + 4, "U8", ((1 << 20) + 4,))
    assert slot_size([[big]]) == (1 << 20) + PAGE


@pytest.mark.rule("XFER-1")
def test_a_type_that_no_slot_holds_is_refused() -> None:
    with pytest.raises(Unsupported, match="F64"):
        layout([TensorRef(Path("f"), 0, 8, "F64", (1,))])


@pytest.mark.rule("XFER-2")
def test_arrays_are_the_slot_and_a_new_generation_leaves_its_neighbours() -> None:
    pool = SlotPool(2, 4096)
    places = layout([TensorRef(Path("f"), 0, 256, "F32", (8, 8))])
    pool.view(0)[:] = 1
    pool.view(1)[:] = 2
    first, other = pool.handle(0, places)[0], pool.handle(1, places)[0]
    assert pool.zero_copy == (jax.default_backend() == "cpu")
    if pool.zero_copy:
        assert first.unsafe_buffer_pointer() == pool.view(0).ctypes.data
        pool.view(0)[:] = 3
        assert np.asarray(first).view(np.uint8).max() == 3
    assert (np.asarray(other).view(np.uint8) == 2).all()
    with pytest.raises(IndexError):
        pool.view(2)


@pytest.mark.rule("XFER-3")
@pytest.mark.parametrize("io", BOTH)
@pytest.mark.parametrize("apart", [0, 3, 5000])
def test_both_ways_of_reading_give_the_files_bits(tmp_path: Path, io: Io, apart: int) -> None:
    shard = Shard(tmp_path, apart=apart)
    spans = plan(shard.refs[ExpertKey(0, 0)], layout(shard.refs[ExpertKey(0, 0)]))
    assert len(spans) == (1 if apart == 0 else 3), "tensors side by side are read together"
    bench = Bench(shard, io=io, check=True)
    assert bench.transfers.io == io
    assert (bench.transfers.bounce_bytes > 0) == (io == "direct")
    for ticket, key in enumerate([*shard.refs, *reversed(shard.refs)], 1):
        done = bench.load(ticket, key, ticket % 3)
        assert done.error is None and shard.good(done)
        assert done.nbytes == 3 * 24 * 20 * 4
        assert done.sum == bench.pool.checksum(done.slot, bench.transfers.places(key))
    assert bench.transfers.stats.bytes == 2 * EXPERTS * done.nbytes
    assert bench.transfers.close()


@pytest.mark.rule("XFER-3")
def test_a_span_longer_than_the_bounce_buffer_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax_impl.spans.BOUNCE_MAX", PAGE)
    shard = Shard(tmp_path)
    bench = Bench(shard, io="direct", threads=1)
    assert bench.transfers.bounce_bytes == PAGE
    key = ExpertKey(1, 2)
    assert shard.good(bench.load(1, key))
    assert bench.transfers.close()
    far = [TensorRef(Path("f"), 100, 5 * BOUNCE_MAX, "U8", (5 * BOUNCE_MAX,))]
    monkeypatch.undo()
    assert bounce_size(plan(far, layout(far))) == BOUNCE_MAX


@pytest.mark.rule("XFER-3")
def test_where_direct_is_refused_auto_reads_buffered_and_says_so(shard: Shard) -> None:
    class NoDirect(FileReader):
        def open(self, path: Path, direct: bool) -> int:
            if direct:
                raise OSError(22, "Invalid argument", str(path))
            return super().open(path, direct)

    bench = Bench(shard, reader=NoDirect())
    assert bench.transfers.io == "buffered"
    assert shard.good(bench.load(1, ExpertKey(0, 1)))
    assert bench.transfers.close()
    with pytest.raises(Unsupported, match="direct reads"):
        Bench(shard, reader=NoDirect(), io="direct")


def test_a_shard_that_is_not_there_is_bad_input(shard: Shard) -> None:
    shard.path.unlink()
    with pytest.raises(BadInput, match=r"shard\.safetensors"):
        Bench(shard)


def reads_of_one_load(shard: Shard, io: Io) -> int:
    counter = FaultyReader("eio", 0, armed=False)
    bench = Bench(shard, reader=counter, io=io)
    counter.arm()
    assert bench.load(1, ExpertKey(0, 0)).error is None
    assert bench.transfers.close()
    return counter.reads


@pytest.mark.rule("XFER-4")
@pytest.mark.parametrize("io", BOTH)
@pytest.mark.parametrize("fault", ["short", "eintr"])
@pytest.mark.parametrize("every", [0, 2])
def test_short_and_interrupted_reads_are_continued(
    shard: Shard, io: Io, fault: str, every: int
) -> None:
    reader = FaultyReader(fault, 1, every, armed=False)  # type: ignore[arg-type]
    bench = Bench(shard, reader=reader, io=io)
    reader.arm()
    for ticket, key in enumerate(shard.refs, 1):
        assert shard.good(bench.load(ticket, key))
    assert reader.fired >= (EXPERTS if every else 1)
    assert bench.transfers.close()


@pytest.mark.rule("XFER-4")
@pytest.mark.parametrize("io", BOTH)
def test_an_endless_storm_of_interrupts_ends_the_load(shard: Shard, io: Io) -> None:
    reader = FaultyReader("eintr", 1, every=1, armed=False)
    bench = Bench(shard, reader=reader, io=io)
    reader.arm()
    done = bench.load(1, ExpertKey(0, 0))
    assert done.error is not None and "interrupted" in done.error and done.drained
    assert bench.transfers.close()


@pytest.mark.rule("XFER-4", "XFER-5")
@pytest.mark.parametrize("io", BOTH)
@pytest.mark.parametrize(("fault", "says"), [("eio", "Input/output error"), ("eof", "ends at")])
def test_every_read_that_fails_fails_its_load_and_no_other(
    tmp_path: Path, io: Io, fault: str, says: str
) -> None:
    shard = Shard(tmp_path, apart=9000)
    total = reads_of_one_load(shard, io)
    assert total >= len(SHAPES)
    for nth in range(1, total + 1):
        reader = FaultyReader(fault, nth, armed=False)  # type: ignore[arg-type]
        bench = Bench(shard, reader=reader, io=io)
        reader.arm()
        bad = bench.load(1, ExpertKey(0, 0))
        assert reader.fired == 1
        assert bad.error is not None and says in bad.error and str(shard.path) in bad.error
        assert bad.drained and not bad.handle
        assert shard.good(bench.load(2, ExpertKey(0, 0))), "the retry reads it whole"
        assert bench.transfers.stats.failed == 1
        assert bench.transfers.close()


@pytest.mark.rule("XFER-5", "XFER-6")
@pytest.mark.parametrize("io", BOTH)
def test_a_file_cut_while_open_fails_the_load(shard: Shard, bench, io: Io) -> None:
    b = bench(io=io)
    size = shard.path.stat().st_size
    os.truncate(shard.path, size - 100)
    done = b.load(1, ExpertKey(1, 2))
    assert done.error is not None and str(size - 100) in done.error and str(size) in done.error
    assert b.load(2, ExpertKey(0, 0)).error is not None, "nothing of a changed file is trusted"


@pytest.mark.rule("XFER-6")
@pytest.mark.parametrize("io", BOTH)
def test_a_file_changed_or_replaced_while_open_fails_the_load(shard: Shard, bench, io: Io) -> None:
    b = bench(io=io)
    data = shard.path.read_bytes()
    assert b.load(1, ExpertKey(0, 0)).error is None
    old = shard.path.stat()
    with shard.path.open("r+b") as file:
        file.write(data[:1])
    os.utime(shard.path, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    assert "changed since" in (b.load(2, ExpertKey(0, 0)).error or "")
    os.utime(shard.path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert b.load(3, ExpertKey(0, 0)).error is None
    other = shard.path.with_suffix(".new")
    other.write_bytes(data)
    other.rename(shard.path)
    assert "replaced" in (b.load(4, ExpertKey(0, 0)).error or "")


@pytest.mark.rule("XFER-6")
def test_files_are_pinned_to_what_the_header_reader_saw(shard: Shard) -> None:
    reader = FileReader()
    files = OpenFiles(reader, [shard.path], "buffered")
    seen = reader.stat(files.descriptor(shard.path)[0], shard.path)[0]
    files.close()
    os.utime(shard.path, ns=(0, 1))
    bench = Bench(shard, pins={shard.path: seen})
    assert "changed since" in (bench.load(1, ExpertKey(0, 0)).error or "")
    assert bench.transfers.close()


@pytest.mark.rule("XFER-7", "XFER-8")
@pytest.mark.parametrize("fault", [None, "eio"])
def test_an_overdue_load_is_told_twice_and_others_go_on(shard: Shard, fault: str | None) -> None:
    class Stalling(ControlledReader):
        def landed(self, ticket: int, key: ExpertKey) -> None:
            super().landed(ticket, key)
            if ticket == 1 and fault:
                raise OSError(5, "Input/output error")

    now = [100.0]
    reader = Stalling(hold=lambda ticket, key: ticket == 1)
    bench = Bench(shard, reader=reader, threads=1, deadline_s=2.0, clock=lambda: now[0])
    t = bench.transfers
    assert t.next_deadline() is None and t.idle == 1
    t.start(1, ExpertKey(0, 0), 0)
    assert t.next_deadline() == 102.0 and t.idle == 0
    reader.waiting(1)
    now[0] = 101.9
    assert t.expire() == []
    now[0] = 102.0
    late = t.expire()
    assert [(d.ticket, d.drained, d.error is not None) for d in late] == [(1, False, True)]
    assert t.expire() == [] and t.next_deadline() is None
    assert t.idle == 1, "another thread has taken its place"
    assert shard.good(bench.load(2, ExpertKey(0, 1), 1)), "no head-of-line blocking"
    with pytest.raises(AssertionError, match="still being written"):
        t.start(3, ExpertKey(0, 2), 0)
    reader.release(1)
    back = bench.next()
    assert back.ticket == 1 and back.drained
    assert (back.error is None) == (fault is None)
    if fault is None:
        assert shard.good(back)
    assert shard.good(bench.load(4, ExpertKey(0, 2), 0)), "the slot is of use again"
    assert t.stats.overdue == 1 and bench.told.empty()
    assert t.idle == 1, "the extra thread has left"
    assert t.close()


@pytest.mark.rule("XFER-7")
def test_close_returns_while_a_read_hangs(shard: Shard) -> None:
    reader = ControlledReader()
    bench = Bench(shard, reader=reader, threads=2)
    bench.transfers.start(1, ExpertKey(0, 0), 0)
    reader.waiting(1)
    began = time.monotonic()
    assert not bench.transfers.close(timeout_s=0.1)
    assert time.monotonic() - began < 2.0
    reader.open_all()
    assert bench.next().ticket == 1
    assert bench.transfers.close()


@pytest.mark.rule("XFER-8")
def test_completions_come_in_the_order_in_which_reads_end(shard: Shard) -> None:
    reader = ControlledReader()
    bench = Bench(shard, reader=reader, threads=3)
    keys = list(shard.refs)
    for ticket in (1, 2, 3):
        bench.transfers.start(ticket, keys[ticket], ticket - 1)
    assert bench.transfers.idle == 0
    assert sorted(reader.waiting(3)) == [1, 2, 3]
    for ticket in (2, 3, 1):
        reader.release(ticket)
        done = bench.next()
        assert done.ticket == ticket and shard.good(done)
    assert bench.told.empty() and bench.transfers.idle == 3
    assert bench.transfers.close()


@pytest.mark.rule("XFER-8")
def test_a_bug_in_a_reader_is_told_and_does_not_lose_the_load(shard: Shard) -> None:
    class Broken(FileReader):
        def landed(self, ticket: int, key: ExpertKey) -> None:
            raise RuntimeError("oops")

    bench = Bench(shard, reader=Broken())
    assert "RuntimeError: oops" in (bench.load(1, ExpertKey(0, 0)).error or "")
    assert bench.transfers.close()


@pytest.mark.rule("XFER-8")
def test_waiting_for_a_slow_read_costs_no_processor_time(shard: Shard) -> None:
    reader: Reader = ThrottledReader(3 * 24 * 20 * 4 / 0.4)
    bench = Bench(shard, reader=reader, io="buffered")
    used, began = time.process_time(), time.monotonic()
    assert shard.good(bench.load(1, ExpertKey(0, 0)))
    assert time.monotonic() - began >= 0.35
    assert time.process_time() - used < 0.1


@pytest.mark.rule("XFER-9")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_throttled_reader_keeps_its_rate(shard: Shard, threads: int) -> None:
    each = 3 * 24 * 20 * 4
    reader = ThrottledReader(each / 0.02)
    bench = Bench(shard, reader=reader, io="buffered", threads=threads)
    began = time.monotonic()
    free, started, keys = [0, 1, 2], 0, list(shard.refs)
    while started < 15 or len(free) < 3:
        while started < 15 and bench.transfers.idle:
            started += 1
            bench.transfers.start(started, keys[started % EXPERTS], free.pop())
        done = bench.next()
        assert done.error is None
        free.append(done.slot)
    took = time.monotonic() - began
    assert reader.bytes == 15 * each
    assert 0.3 <= took < 0.45, "15 loads of 20 ms each, one after another on the channel"
    assert 0.28 <= bench.transfers.stats.busy_s <= took
    assert bench.transfers.close()


@pytest.mark.rule("XFER-10")
def test_a_flipped_bit_shows_in_the_checksum(shard: Shard) -> None:
    sums = []
    for fault_at in (0, 1):
        reader = FaultyReader("flip", fault_at, armed=False)
        bench = Bench(shard, reader=reader, check=True)
        reader.arm()
        done = bench.load(1, ExpertKey(0, 0))
        assert done.error is None and shard.good(done) == (reader.fired == 0)
        sums.append(done.sum)
        assert bench.transfers.close()
    assert sums[0] != sums[1]


@pytest.mark.rule("XFER-2")
def test_the_quick_way_to_an_array_is_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same memory, values and placement; another jax than those known costs time, not results."""
    memory = np.frombuffer(slots.private_memory(4096), np.uint8)
    memory[:] = np.arange(4096) % 251
    views = [memory[64:192].view(np.float32).reshape(4, 8), memory[256:320].view(np.uint16)]
    quick, usual = slots.quick_put()(views), jax.device_put(views)
    for a, b, view in zip(quick, usual, views, strict=True):
        assert a.aval == b.aval and a.sharding == b.sharding and a.committed == b.committed
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() == view.tobytes()
        if jax.default_backend() == "cpu":
            assert a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer() == view.ctypes.data
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    monkeypatch.setattr(xla_client, "batched_device_put", None)
    assert slots.quick_put() is jax.device_put
    monkeypatch.setattr(xla_client, "batched_device_put",
                        lambda aval, sharding, xs, *more: jax.numpy.array(xs[0]))
    assert slots.quick_put() is jax.device_put, "a copy is not the slot's memory"
