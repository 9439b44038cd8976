"""A checkpoint of gigabytes for benchmarks: random weights that route and write like real models.

    python -m perf.bench_checkpoint OUT --shape qwen3_moe --gib 2 --seed 0

Plain random weights route every token at random and fall into a loop of a few tokens. Here the
router's scores are a sum of parts with stated shares of the variance, in every layer anew:

    all         the same for every token of every request: some experts are popular
    request     the same for all tokens of a request: it has experts of its own
    recent      of the last few tokens, with correlation `rho` from one token to the next
    token       of the token alone

The shares are those with which a sum of Gaussians has the published routing statistics of
Qwen3-30B-A3B (128 experts, 8 a token) and of Mixtral (routes near uniform). How it is done: the
hidden state is cut into blocks. The embedding fills one with a constant, one with the token's own
vector, and marks a quarter of the vocabulary as *topical*. In the first layer one head looks at the
last few tokens, another, by frequencies that do not turn, at the topical tokens, of which the head
of the model never writes another one: what they find fills two more blocks. Routers read the blocks
with the stated shares. Everything else is dense and random; `covey trace` shows what comes of it.
Texts go on without loops of a few tokens, for what is written next depends on all before it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oracle.checkpoint_writer import write_checkpoint
from oracle.tiny import tiny_config
from oracle.weight_source import Form, Source, encode
from reference.files.config_json import model_config
from reference.files.layout import Shape
from reference.vocab.config import ModelConfig
from reference.vocab.errors import BadInput

SPARE = 0.02
"""Deviation, in units of a dense matrix's, of the entries that have no task."""
DOWN = 0.25
"""Factor on the experts' output: all layers together stay below the embedding."""
SHARPNESS = 2.0
"""Standard deviation of router scores."""
TOPICAL = 4
"""One token in so many is topical."""


@dataclass(frozen=True)
class Shares:
    """Shares of the variance of a router's scores; they add up to 1."""

    all: float
    request: float
    recent: float
    token: float
    rho: float = 0.45


QWEN3 = Shares(all=0.25, request=0.35, recent=0.40, token=0.0)
"""Published overlaps of Qwen3-30B-A3B invert to correlations of 0.72 from one token to the next,
0.55 at far lags and 0.26 between requests; the part of the token alone comes from the experts."""
MIXTRAL = Shares(all=0.014, request=0.06, recent=0.10, token=0.826)
"""Top quarter of the experts takes about 27 %; consecutive first choices agree little more than by
chance."""

SHAPES: dict[str, tuple[dict[str, Any], Shares]] = {
    "qwen3_moe": ({
        "hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 64,
        "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096,
        "intermediate_size": 1024, "rope_theta": 1e6,
    }, QWEN3),
    "mixtral": ({
        "hidden_size": 1024, "intermediate_size": 1792, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096, "rope_theta": 1e6,
    }, MIXTRAL),
}  # fmt: skip


class Routed(Source):
    """Values by role, as described above. Whole matrices are drawn but for the experts'."""

    def __init__(self, seed: int, config: ModelConfig, shares: Shares) -> None:
        super().__init__(seed, 1.0, False, False)
        self.config, self.shares = config, shares
        self.attention = config.layers[0].attention
        hidden = config.hidden
        edges = np.cumsum([hidden // 16, hidden // 16, hidden // 4, hidden // 4])
        flag, recent, request = (slice(a, b) for a, b in pairwise(edges))
        self.blocks = {"all": slice(0, edges[0]), "flag": flag, "recent": recent,
                       "request": request, "token": slice(edges[-1], hidden)}  # fmt: skip
        self.signs = np.sign(self._gauss("signs", (hidden,)))

    def pieces(
        self, role: str, shape: Shape, dtype: str, inputs: int, form: Form = "plain"
    ) -> Iterator[bytes]:
        """As Source.pieces; what has a task here is made as a whole."""
        where, kind = (role.rsplit(".", 1) if "." in role else ("", role))
        make = getattr(self, f"_{kind}", None)
        if make is not None and ".experts." not in role:
            yield encode(make(role, shape, where), dtype)
            return
        yield from super().pieces(role, shape, dtype, inputs, form)

    def _moments(self, role: str, inputs: int, form: Form) -> tuple[float, float]:
        mean, deviation = super()._moments(role, inputs, form)
        return mean, deviation * (DOWN if ".experts." in role and role.endswith("down") else 1.0)

    def _gauss(self, role: str, shape: Shape) -> np.ndarray:
        """Nearly normal numbers: sums of three uniform ones."""
        count = math.prod(shape)
        return (self._uniform(role, 3 * count).reshape(3, count).sum(0) / math.sqrt(3)).reshape(
            shape
        )

    def _spare(self, role: str, shape: Shape) -> np.ndarray:
        return SPARE / math.sqrt(shape[-1]) * self._gauss(role, shape)

    # -- the ends

    def topical(self) -> np.ndarray:
        """bool [vocab]."""
        return np.arange(self.config.vocab) % TOPICAL == TOPICAL - 1

    def _embed(self, role: str, shape: Shape, where: str) -> np.ndarray:
        values = SPARE * self._gauss(role, shape)
        values[:, self.blocks["token"]] += self._gauss(role + ".token", shape)[
            :, self.blocks["token"]]
        values[:, self.blocks["all"]] += self.signs[self.blocks["all"]]
        strength = np.where(self.topical(), 1.5 + self._uniform("strength", shape[0]) * 0.7, 0.0)
        values[:, self.blocks["flag"]] += np.outer(strength, self.signs[self.blocks["flag"]])
        return values

    def _lm_head(self, role: str, shape: Shape, where: str) -> np.ndarray:
        """Logits of deviation about 3, from the last token, those before it, the topic, and what
        is far back, which keeps texts out of loops; no topical token is ever the best."""
        values = self._gauss(role, shape)
        for name, gain in (("token", 1.0), ("recent", 1.5), ("request", 1.0), ("all", 0.3),
                           ("flag", 2.0)):  # fmt: skip
            block = self.blocks[name]
            values[:, block] *= gain / math.sqrt(block.stop - block.start)
        block = self.blocks["all"]
        values[self.topical(), block] -= 40.0 / (block.stop - block.start) * self.signs[block]
        return values

    # -- attention: KV head 0 looks at the last tokens, KV head 1 at topical ones

    def _heads(self, role: str, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """(the matrix, as heads [N, D, in]: a view)."""
        values = self._spare(role, shape)
        return values, values.reshape(-1, self.attention.head_dim, shape[1])

    def _turning(self) -> np.ndarray:
        """float64 [D]: 1 at six fast frequencies: what is one, two, three tokens back gets about
        0.5, 0.07, 0.005 times the weight of the token itself, for heads of 64 entries."""
        half = self.attention.head_dim // 2
        fast = np.arange(half)
        return np.tile((fast >= 1) & (fast < 7), 2).astype(float)

    def _still(self, second: bool) -> np.ndarray:
        """float64 [D]: 1 at one half of the slowest frequencies, `second`: at the other half."""
        half = self.attention.head_dim // 2
        slow = np.arange(half) >= half - half // 4
        odd = np.arange(half) % 2 == 1
        return np.tile(slow & (odd == second), 2).astype(float)

    def _read(self, block: str, gain: float) -> np.ndarray:
        """A row that reads a block's constant direction: `gain` times its strength."""
        row = np.zeros(self.config.hidden)
        b = self.blocks[block]
        row[b] = gain / (b.stop - b.start) * self.signs[b]
        return row

    def _strength(self, where: str) -> float:
        """What entries of q and k get without a norm of their own; the first layer's input is
        smaller and its norm larger."""
        if self.attention.qk_norm != "none":
            return 1.0
        return 1.1 if where != "layers.0" else 0.75

    def _q(self, role: str, shape: Shape, where: str) -> np.ndarray:
        values, heads = self._heads(role, shape)
        each = self.attention.heads // self.attention.kv_heads
        gain = self._strength(where)
        turning, still = self._turning(), self._still(False)
        size = math.sqrt(self.attention.head_dim)
        for n, entries in ((0, turning), (1, still)):
            row = self._read("all", gain * size / math.sqrt(entries.sum()))
            heads[n * each : (n + 1) * each] += np.outer(entries, row)
        heads[2 * each :] += self._gauss(role + ".rest", heads[2 * each :].shape) / math.sqrt(
            shape[1])
        return values

    def _k(self, role: str, shape: Shape, where: str) -> np.ndarray:
        values, heads = self._heads(role, shape)
        gain, size = self._strength(where), math.sqrt(self.attention.head_dim)
        turning, flag, other = self._turning(), self._still(False), self._still(True)
        heads[0] += np.outer(turning, self._read("all", gain * size / math.sqrt(turning.sum())))
        heads[1] += np.outer(flag, self._read("flag", gain * size / math.sqrt(flag.sum())))
        heads[1] += np.outer(other, self._read("all", gain * size / math.sqrt(other.sum())))
        heads[2:] += self._gauss(role + ".rest", heads[2:].shape) / math.sqrt(shape[1])
        return values

    def _v(self, role: str, shape: Shape, where: str) -> np.ndarray:
        values, heads = self._heads(role, shape)
        block = self.blocks["token"]
        part = heads[:, :, block]
        part += self._gauss(role + ".token", part.shape) / math.sqrt(block.stop - block.start)
        return values

    def _o(self, role: str, shape: Shape, where: str) -> np.ndarray:
        """The first layer's heads 0 and 1 fill their blocks, head 2, which looks anywhere, the
        one that routers do not read; all else is a whisper."""
        values = self._gauss(role, shape) * (0.15 / math.sqrt(shape[1]))
        if where != "layers.0":
            return values
        each = self.attention.heads // self.attention.kv_heads
        width = each * self.attention.head_dim
        for n, name, gain in ((0, "recent", 1.0), (1, "request", 1.2), (2, "flag", 2.5)):
            there = self.blocks[name], slice(n * width, (n + 1) * width)
            part = self._gauss(f"{role}.{name}", values[there].shape)
            # The heads of a group find the same: their parts add up.
            values[there] += part * gain / (math.sqrt(self.attention.head_dim) * math.sqrt(each))
        return values

    def _q_norm(self, role: str, shape: Shape, where: str) -> np.ndarray:
        return np.full(shape, 1.25)

    def _k_norm(self, role: str, shape: Shape, where: str) -> np.ndarray:
        return np.full(shape, 1.25)

    # -- routing

    def _router(self, role: str, shape: Shape, where: str) -> np.ndarray:
        values = self._gauss(role, shape)
        gains = {name: math.sqrt(getattr(self.shares, name)) for name in
                 ("all", "recent", "request", "token")} | {"flag": 0.0}  # fmt: skip
        for name, gain in gains.items():
            block = self.blocks[name]
            values[:, block] *= SHARPNESS * gain / math.sqrt(block.stop - block.start)
        return values


def config_of(shape: str, gib: float, **changes: Any) -> tuple[dict[str, Any], Shares]:
    """(config.json, shares) of a shape whose routed experts take about `gib` GiB in bfloat16."""
    if shape not in SHAPES:
        raise BadInput(f"--shape: unsupported {shape!r}; supported: {', '.join(SHAPES)}")
    fields, shares = SHAPES[shape]
    fields = fields | changes
    one = tiny_config(shape, **{**fields, "num_hidden_layers": 1})
    config = model_config(one, "config")
    moe = config.layers[0].feed_forward
    layer = config.experts * 3 * config.hidden * moe.intermediate * 2
    layers = fields.get("num_hidden_layers") or max(1, round(gib * 2**30 / layer))
    return tiny_config(shape, **{**fields, "num_hidden_layers": layers}), shares


def write_bench(
    out: Path, shape: str, gib: float, seed: int = 0, dtype: str = "BF16", **changes: Any
) -> Path:
    """Writes the checkpoint into the folder `out`; files of about 1 GiB. Returns `out`."""
    hf_config, shares = config_of(shape, gib, **changes)
    source = Routed(seed, model_config(hf_config, "config"), shares)
    return write_checkpoint(out, hf_config, dtype=dtype, shards=max(1, round(gib)), source=source)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--shape", default="qwen3_moe", help=", ".join(SHAPES))
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of routed experts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not 0 < args.gib <= 64:
        parser.error(f"--gib: {args.gib}; above 0 and at most 64 expected")
    try:
        print(write_bench(args.out, args.shape, args.gib, args.seed))
    except BadInput as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
