"""What the engine knows a client's request or warming prompt by, and back.

A client may use an id again at once, so an id of ours has a serial number in it.
"""

from dataclasses import dataclass

_SERIAL_MARK = "~"  # not allowed in a client's request id
_WARM_MARK = "w"  # after it, where a wire id names a prompt of a warming job


def wire_id(request_id: str, serial: int) -> str:
    """What the engine knows a request by."""
    return f"{request_id}{_SERIAL_MARK}{serial}"


def warm_wire_id(key: str, serial: int, index: int) -> str:
    """What the engine knows a prompt of a warming job by."""
    return f"{key}{_SERIAL_MARK}{_WARM_MARK}{serial}.{index}"


@dataclass(frozen=True, slots=True)
class ClientName:
    """What a client knows a wire id by: its request id or its warming job's key, and there the prompt's index."""

    name: str
    warm_index: int | None


def client_name(wire_id: str) -> ClientName:
    """The client's name of what the engine calls `wire_id`."""
    name, mark, serial = wire_id.rpartition(_SERIAL_MARK)
    if not mark:
        return ClientName(wire_id, None)
    index = serial.partition(".")[2] if serial.startswith(_WARM_MARK) else ""
    return ClientName(name, int(index) if index else None)


def client_owner(owner: str) -> str:
    """The client's name of a sequence that owns something, from the engine's: `request id/index`."""
    wire_id, slash, index = owner.partition("/")
    client = client_name(wire_id)
    return f"{client.name}/{client.warm_index}" if client.warm_index is not None else f"{client.name}{slash}{index}"
