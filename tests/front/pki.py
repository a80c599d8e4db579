"""Certificates for tests, made when they run and kept nowhere else."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    cert: bytes
    key: bytes
    serial: int

    def write(self, cert: Path, key: Path) -> None:
        """In place of what is there, the key for its owner alone. The pair changes as an operator would change it."""
        for path, content in ((cert, self.cert), (key, self.key)):
            fresh = path.with_suffix(".new")
            fresh.touch(mode=0o600)
            fresh.write_bytes(content)
            fresh.rename(path)


class Authority:
    """Signs what it is asked to."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(self._name, self._name, self._key.public_key(), timedelta(days=1))
        self._cert = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.pem = self._cert.public_bytes(serialization.Encoding.PEM)

    def issue(self, *names: str, lifetime: timedelta = timedelta(hours=1)) -> Pair:
        """A certificate whose alternative names these are: URIs, addresses or DNS names. It began an hour ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        builder = _builder(_name("leaf"), self._name, key.public_key(), lifetime)
        cert = builder.add_extension(alternatives, critical=False).sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(cert.public_bytes(serialization.Encoding.PEM), private, cert.serial_number)

    def channel(self, address: str, client: Pair | None, token: str | None = None) -> grpc.Channel:
        """A connection of its own, which trusts this authority."""
        key, cert = (client.key, client.cert) if client is not None else (None, None)
        credentials = grpc.ssl_channel_credentials(self.pem, key, cert)
        if token is not None:
            credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))
        return grpc.secure_channel(address, credentials, options=(("grpc.use_local_subchannel_pool", 1),))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - timedelta(days=2)).not_valid_after(now + lifetime)


def _alternative(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
