"""Copy a model so that every expert lies in the file as it will in memory.

Direct reads then go straight into the slots, without a bounce buffer and a copy. The result is an
ordinary model folder that other tools read too. Never needed: every command reads unpacked models.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jax_impl.app import builtin, engines
from jax_impl.app.output import Progress
from reference.files.aligned import Copy, plan_copy, write_copy
from reference.files.budget import PAGE, parse_size, show_size, slot_size
from reference.files.checkpoint import Checkpoint
from reference.files.regular import inside, reason
from reference.files.shards import INDEX
from reference.vocab.errors import BadInput, CoveyError

SMALL_BYTES = 256 << 20
"""Files beside the weights are copied up to this size."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey pack`."""
    parser.add_argument("model", metavar="MODEL", type=builtin.model,
                        help="folder with config.json and safetensors files, or demo: built in")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make; it must not exist")
    parser.add_argument("--shard", metavar="SIZE", default="4GiB",
                        help="bytes of a file, about (default: 4GiB)")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(args: argparse.Namespace) -> int:
    """0 once OUT is whole; it is absent otherwise (PACK-2)."""
    shard = parse_size(args.shard)
    if shard < 1:
        raise BadInput(f"--shard: {shard} bytes; at least 1 expected")
    model = engines.model_of(args)
    if os.path.lexists(args.out):
        raise BadInput(f"{args.out}: exists already; pack never writes over anything")
    progress = Progress(args.quiet)
    with Checkpoint.open(model) as ckpt:
        if not ckpt.config.moe_layers:
            raise BadInput(f"{model}: a dense model has no experts to align")
        copy = plan_copy(ckpt, shard)
        with folder(args.out, copy.total) as to:
            skipped = copy_beside(model, to)
            write_copy(ckpt, copy, to, lambda done: progress.show(
                f"{done / copy.total:.0%} of {show_size(copy.total)}"))
            with Checkpoint.open(to) as made:
                aligned = check(ckpt, made)
        print("\n".join(lines_of(ckpt, copy, args.out, aligned, skipped)))
    return 0


@contextmanager
def folder(out: Path, nbytes: int) -> Iterator[Path]:
    """A temporary folder beside `out` that gets its name when all went well, else is removed.

    Raises BadInput where there is no room or the place cannot be written, CoveyError when the
    disk refuses on the way.
    """
    parent = out.absolute().parent
    try:
        free = shutil.disk_usage(parent).free
        if free < nbytes:
            raise BadInput(f"{parent}: {show_size(free)} are free; the copy takes "
                           f"{show_size(nbytes)}")
        to = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=parent))
    except OSError as error:
        raise BadInput(f"{parent}: cannot be written: {reason(error)}") from None
    try:
        yield to
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(to, 0o777 & ~umask)
        os.rename(to, out)
    except OSError as error:
        raise CoveyError(f"{out}: not made: {reason(error)}") from None
    finally:
        shutil.rmtree(to, ignore_errors=True)


def copy_beside(model: Path, to: Path) -> list[str]:
    """Copies config.json, tokenizer and the like; returns the names that were left out."""
    skipped = []
    for name in sorted(os.listdir(model)):
        if name.endswith(WEIGHTS) or name == INDEX:
            continue
        try:
            path = inside(model, name)
        except BadInput:
            skipped.append(name)
            continue
        if not path.is_file() or path.stat().st_size > SMALL_BYTES:
            skipped.append(name)
            continue
        shutil.copyfile(path, to / name)
    return skipped


def check(old: Checkpoint, new: Checkpoint) -> int:
    """How many experts begin at a multiple of 4096. Raises CoveyError unless it is the same model:
    the same roles, shapes and types."""
    def form(refs: object) -> list[tuple[str, tuple[int, ...]]]:
        return [(r.dtype, r.shape) for r in refs]  # type: ignore[attr-defined]

    same = old.config.layers == new.config.layers and old.roles == new.roles and all(
        form([old.tensor(role)]) == form([new.tensor(role)]) for role in old.roles)
    aligned = 0
    for layer in old.config.moe_layers:
        for expert in range(old.config.experts):
            refs = new.expert(layer, expert)
            same = same and form(refs) == form(old.expert(layer, expert))
            aligned += refs[0].offset % PAGE == 0
    if not same:
        raise CoveyError(f"{new.path}: the copy is not the same model; this is a bug")
    return aligned


def lines_of(
    ckpt: Checkpoint, copy: Copy, out: Path, aligned: int, skipped: list[str]
) -> list[str]:
    """What was made, and what it brings (PACK-3), for people."""
    config = ckpt.config
    count = len(config.moe_layers) * config.experts
    lines = [f"{out}: {show_size(copy.total)} in {len(copy.files)} files; {aligned} of {count} "
             f"experts begin at a multiple of {PAGE}"]
    if copy.fillers:
        lines.append(f"{copy.fillers} tensors named __pad_N fill what sizes left over; readers "
                     "that list unknown tensors will list them")
    if skipped:
        lines.append(f"not copied: {', '.join(skipped)}")
    slot = slot_size(ckpt.expert(la, e) for la in config.moe_layers for e in range(config.experts))
    if slot % PAGE:
        lines.append(f"slots of {show_size(slot)} are no whole pages: direct reads still go "
                     "through a bounce buffer (from experts of 1 MiB on they do not)")
    return lines
