"""Ports are allotted from a configured range, never guessed."""

import socket

from app.config import PortRange
from app.errors import EngineStartError


def allot(ports: PortRange, rank: int, count: int) -> int:
    """The first of `count` consecutive free ports, looked for from the slot that belongs to `rank` onwards.

    Slots keep replicas that start together on one node apart; looking on keeps a restarted replica off a port that its
    predecessor has not yet given back.

    Raises:
        EngineStartError: when the range holds no `count` consecutive free ports.
    """
    slots = ports.count // count
    for offset in range(slots):
        first = ports.first + (rank + offset) % slots * count
        if all(_free(port) for port in range(first, first + count)):
            return first
    raise EngineStartError(
        f"side_channel_ports {ports.first}-{ports.last}: no {count} consecutive free ports on this node; "
        "widen the range"
    )


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
