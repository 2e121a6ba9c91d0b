"""A development CA with one certificate for a server and one for a client. Pure: no files, no clock.

For tests and small setups: the CA's key can issue more certificates, and none is ever revoked. Not trustme: its
certificates are valid for servers and clients alike, and its CA until 2038.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from envd.base.errors import ConfigError

VALID_DAYS = 365
#: Clocks of hosts differ.
_CLOCK_SKEW = timedelta(hours=1)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate and its key, PEM."""

    cert_pem: bytes
    key_pem: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevelopmentCerts:
    """A CA and the certificates that it signed."""

    ca: Issued
    server: Issued
    client: Issued
    expire_time: datetime


def make_development_certs(hosts: Sequence[str], *, now: datetime) -> DevelopmentCerts:
    """Create a CA, a certificate for a server with these names and loopback, and one for a client.

    Args:
        now: The certificates are valid from an hour before, for a year.

    Raises:
        ConfigError: A host is neither a DNS name nor an IP address.
    """
    names = [_general_name(host) for host in dict.fromkeys([*hosts, *_LOOPBACK])]
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = (
        _builder("envd development authority", None, authority_key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )

    def issue(name: str, purpose: x509.ObjectIdentifier, alternatives: list[x509.GeneralName]) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(name, authority, key, now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return _issued(builder.sign(authority_key, hashes.SHA256()), key)

    return DevelopmentCerts(
        ca=_issued(authority, authority_key),
        server=issue("envd server", ExtendedKeyUsageOID.SERVER_AUTH, names),
        client=issue("envd client", ExtendedKeyUsageOID.CLIENT_AUTH, []),
        expire_time=authority.not_valid_after_utc,
    )


def expire_time_of(cert_pem: bytes) -> datetime:
    """Return the expiry of the first certificate in a PEM file. Raises: ValueError: there is none."""
    return x509.load_pem_x509_certificate(cert_pem).not_valid_after_utc


def name_of(cert_pem: bytes) -> str:
    """Return a name that the first certificate in a PEM file is valid for; empty if it has none."""
    try:
        names = x509.load_pem_x509_certificate(cert_pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ""
    domains = names.value.get_values_for_type(x509.DNSName)
    return next((str(name).replace("*", "any", 1) for name in [*domains, *(name.value for name in names.value)]), "")


def _builder(
    name: str, issuer: x509.Certificate | None, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issued(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    return Issued(
        cert_pem=certificate.public_bytes(serialization.Encoding.PEM),
        key_pem=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    if not host.isascii() or len(host) > 253 or not all(label.replace("-", "").isalnum() for label in labels):
        raise ConfigError(f"--host {host}: neither a DNS name nor an IP address; leave out scheme and port")
    return x509.DNSName(host)
