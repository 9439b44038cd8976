"""Devices and networks as data, each with where its numbers are from. Bytes, seconds, FLOP/s."""

from __future__ import annotations

from dataclasses import dataclass

from reference.vocab.errors import BadInput

GB, TB, TFLOPS, US = 1e9, 1e12, 1e12, 1e-6

PAPER = "Lamina, arXiv 2405.01814v2: table of hardware"
NETWORK = "Lamina, arXiv 2405.01814v2: section on its network stack"


@dataclass(frozen=True)
class Device:
    """flops: dense BF16 peak. price: dollars an hour. nic: bytes/s of its network port."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    nic: float
    price: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOP a byte above which it is compute that limits."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Network:
    """A message of x bytes takes rtt / 2 + x / rate."""

    name: str
    rtt: float
    rate: float
    source: str

    def one_way(self, nbytes: float, ports: int = 1) -> float:
        """Seconds for `nbytes` spread over `ports` network ports."""
        return self.rtt / 2 + nbytes / (self.rate * ports)


DEVICES = {
    d.name: d
    for d in (
        Device("H100", 989 * TFLOPS, 80 * GB, 3.35 * TB, 50 * GB, 11.06, PAPER),
        Device("H20", 148 * TFLOPS, 96 * GB, 4.0 * TB, 50 * GB, 4.63,
               PAPER + "; its price is the paper's estimate from the cost of a system"),
        Device("TPUv6e", 918 * TFLOPS, 32 * GB, 1.64 * TB, 25 * GB, 2.70, PAPER),
    )
}  # fmt: skip

NETWORKS = {
    n.name: n
    for n in (
        Network("fhbn", 33.0 * US, 45.7 * GB, NETWORK),
        Network("nccl", 66.6 * US, 35.5 * GB, NETWORK),
        Network("ideal", 0.0, float("inf"), "no network at all, to see what it costs"),
    )
}


def device(name: str) -> Device:
    """By name. Raises BadInput for one that is not in the table."""
    if name not in DEVICES:
        raise BadInput(f"device: {name!r} is not known; known: {', '.join(DEVICES)}")
    return DEVICES[name]


def network(name: str) -> Network:
    """By name. Raises BadInput for one that is not in the table."""
    if name not in NETWORKS:
        raise BadInput(f"network: {name!r} is not known; known: {', '.join(NETWORKS)}")
    return NETWORKS[name]
