"""The flags of a warm start: which experts were hot is kept from one run to the next."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jax_impl.app.output import WholeFile, write_json
from reference.files.checkpoint import Checkpoint
from reference.files.residency import document, read_residency

Heat = dict[tuple[int, int], float]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --residency and --save-residency."""
    group = parser.add_argument_group("warm start")
    group.add_argument("--residency", metavar="FILE", type=Path,
                       help="read the experts that were hot in earlier runs before the first "
                            "request")
    group.add_argument("--save-residency", metavar="FILE", type=Path,
                       help="write which experts were hot in this run (and in those of "
                            "--residency, at half their heat)")


def before(args: argparse.Namespace, model: Path) -> Heat:
    """What --residency says of earlier runs, hottest first. Raises BadInput for another model's."""
    if not args.residency:
        return {}
    with Checkpoint.open(model) as ckpt:
        return read_residency(args.residency, ckpt)


def save(out: WholeFile, model: Path, engine: Any, known: Heat) -> None:
    """Writes the heat of a run that has ended."""
    with Checkpoint.open(model) as ckpt:
        write_json(out, document(ckpt, engine.heat(), known))
