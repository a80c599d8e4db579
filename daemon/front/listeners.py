"""Where the daemon listens, who is let in there, and what is served to whom.

Each address is a gRPC server of its own, so that what holds of its callers is known before a call is looked at. With an
address for administration AdminService is there and nowhere else; health and reflection are everywhere.
"""

import asyncio
import logging
import os
import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from daemon.errors import ErrorReason
from daemon.front.access import ADMIN, HEALTH, REFLECTION
from daemon.front.caller import local_principal
from daemon.front.config import FrontConfig
from daemon.front.door import Door
from daemon.front.guard import SHED, Guard
from daemon.front.held import HeldBytes
from daemon.front.limits import Uses
from daemon.front.principals import Directory, read_principals
from daemon.front.reflection import Reflection
from daemon.front.service import methods_of
from daemon.front.sockets import Claim, claim_socket, tcp_target
from daemon.front.tls import Tls, TlsFiles
from daemon.front.watched import Watched

log = logging.getLogger("downcore.front")

MAX_REQUEST_BYTES = 16 << 20
MAX_RESPONSE_BYTES = 128 << 20  # Tokenize of the largest prompt
MAX_METADATA_BYTES = 8 << 10
SPARE_CALLS = 512  # besides Generate: health, admin, reflection
SPARE_FILES = 256  # descriptors for the engine, workers, scrapes and files, whoever connects
LEAST_CONNECTIONS = 64
MAX_CONNECTION_AGE_S = 3600  # then a client is asked to connect anew: no old certificate lives on in a connection
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_channelz", 0),  # nobody reads its traces, which are kept for every channel and socket
    # A peer that has gone without a word is found out, so that its streams do not stay for ever.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients may do the same, every 10 s as many are set to, with or without a stream: they are not sent away for it.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
AGE_OPTION = ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_S * 1000)
EVERYWHERE = (HEALTH,)


@dataclass(frozen=True, slots=True)
class Address:
    """One place to listen: a Unix socket that is claimed, or loopback or guarded TCP."""

    target: str
    claim: Claim | None
    is_admin: bool


class Listeners:
    """All of them, from the moment the sockets are claimed until they are released.

    Raises:
        ListenError: an address is taken, or not to be had without TLS and authentication, or a file cannot be used.
    """

    def __init__(self, config: FrontConfig) -> None:
        self._config = config
        self.directory = _directory(config.principals_file)
        self._tls = _tls(config)
        self.uses = Uses(HeldBytes(config.max_held_bytes))
        self.refused: Counter[ErrorReason] = Counter()  # calls, by reason
        self.failed: Counter[tuple[str, ErrorReason]] = Counter()  # the same, and every other error, by method
        self._refused_told = self._shed_told = 0
        self._servers: list[Any] = []
        self._addresses: list[Address] = []
        try:
            self._claim_all()
        except BaseException:
            self.release()
            raise

    @property
    def has_files(self) -> bool:
        """There are files that may be read again."""
        return self.directory is not None or self._tls is not None

    async def start(self, servicers: Mapping[str, object]) -> list[str]:
        """Serves these services, by name. Returns: where."""
        has_admin = any(address.is_admin for address in self._addresses)
        listening: list[str] = []
        for address in self._addresses:
            here = {
                name: servicer
                for name, servicer in servicers.items()
                if name in EVERYWHERE or not has_admin or (name == ADMIN) == address.is_admin
            }
            here[REFLECTION] = Reflection((*here, REFLECTION))
            listening.append(await self._serve(address, here))
        return listening

    async def _serve(self, address: Address, servicers: Mapping[str, object]) -> str:
        methods = {path: served for name, one in servicers.items() for path, served in methods_of(name, one).items()}
        num_calls = self._config.max_open_requests + SPARE_CALLS
        most = most_connections(num_calls, len(self._addresses))
        options = (*OPTIONS, ("grpc.max_allowed_incoming_connections", most))
        options = options if self._tls is None else (*options, AGE_OPTION)
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=num_calls)
        guard = Guard(methods, self._door(address), self.uses, self.refused, self.failed)
        server.add_generic_rpc_handlers((guard,))
        for name in servicers:  # so that the core itself knows their paths; the guard handles them all the same
            names = (path.rpartition("/")[2] for path in methods if path.startswith(f"/{name}/"))
            no_handlers: Any = dict.fromkeys(names)
            server.add_registered_method_handlers(name, no_handlers)
        self._servers.append(server)
        if address.claim is not None or self._tls is None:
            port = server.add_insecure_port(address.target)
        else:
            port = server.add_secure_port(address.target, self._tls.credentials())
        await server.start()
        if address.claim is None:
            return f"{address.target.rpartition(':')[0]}:{port}"
        os.chmod(address.claim.path, 0o600)
        return address.target

    def poll(self, *, force: bool = False) -> list[str]:
        """Reads the files again that have changed. Returns: which, in words."""
        changed: list[str] = []
        if self._tls is not None and self._tls.poll(force=force):
            changed.append("certificates")
        if self.directory is not None and self.directory.poll(force=force):
            changed.append(f"{len(self.directory.value.principals)} principals")
            self.uses.forget(self.directory.value)
        return changed

    def end_unknown(self, now_s: float) -> int:
        """Ends the calls whose credential has expired or is taken out. Returns: how many."""
        return self.uses.end_unknown(self.directory.value, now_s) if self.directory is not None else 0

    def tell_refused(self) -> int:
        """Logs how many calls were refused since it last did: a line, however many there were.

        Returns: how many of them for want of room.
        """
        num_shed, self._shed_told = self._shed_told, sum(self.refused[reason] for reason in SHED)
        total = self.refused.total()
        if total != self._refused_told:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.refused.items()))
            log.warning("%d calls refused; since the start: %s", total - self._refused_told, counts)
            self._refused_told = total
        return self._shed_told - num_shed

    async def stop(self, grace_s: float) -> None:
        """Lets calls end within the grace, ends the rest, and closes all ports."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    def release(self) -> None:
        """Removes the sockets and lets another daemon have their paths."""
        for address in self._addresses:
            if address.claim is not None:
                address.claim.release()

    def _claim_all(self) -> None:
        config = self._config
        is_guarded = self._tls is not None and self.directory is not None
        for tcp, is_admin in ((config.tcp, False), (config.admin_tcp, True)):
            if tcp is not None:
                self._addresses.append(Address(tcp_target(tcp, is_guarded=is_guarded), None, is_admin))
        for path, is_admin in ((config.admin_listen, True), (config.listen, False)):
            if path is not None:
                claim = claim_socket(path)
                self._addresses.insert(0, Address(claim.target, claim, is_admin))

    def _door(self, address: Address) -> Door:
        local = local_principal(self._config.namespace)
        is_local = self.directory is None or (address.claim is not None and not self._config.local_needs_token)
        has_ca = self._tls is not None and self._tls.files.client_ca is not None
        return Door(self.directory, local if is_local else None, sees_certificates=has_ca and address.claim is None)


def most_connections(num_calls: int, num_listeners: int) -> int:
    """What each listener takes at a time: one for each call, and no more than there are descriptors to share.

    One that is over is closed at once, before anything is read from it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return num_calls
    return max(min(num_calls, (soft - SPARE_FILES) // num_listeners), LEAST_CONNECTIONS)


def _directory(path: str | None) -> Watched[Directory] | None:
    if path is None:
        return None
    file = Path(path)
    return Watched((file,), lambda: read_principals(file))


def _tls(config: FrontConfig) -> Tls | None:
    if config.tls_cert_file is None or config.tls_key_file is None:
        return None
    client_ca = Path(config.tls_client_ca_file) if config.tls_client_ca_file is not None else None
    return Tls(TlsFiles(Path(config.tls_cert_file), Path(config.tls_key_file), client_ca))
