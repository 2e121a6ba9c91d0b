"""TLS of the gRPC and HTTP servers, with optional client certificates. Changed files apply to the next connection."""

import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import grpc
from cryptography import x509

from envd.api.security.secret_files import Reloaded, read_file, read_secret
from envd.base.errors import ConfigError


def server_credentials(
    *, cert: Path, key: Path, client_ca: Path | None, on_stale: Callable[[bool], None]
) -> grpc.ServerCredentials:
    """Return credentials that are reloaded when their files change.

    Args:
        key: Its private key, PEM, without a passphrase.
        client_ca: CA of the client certificates, which are then required; None to require none.
        on_stale: Called after each change of the files with whether older ones are still in use.

    Raises:
        ConfigError: A file cannot be read or is not PEM, or certificate and key do not match.
    """
    paths = [cert, key] + ([client_ca] if client_ca else [])
    files = Reloaded(
        "security.tls_cert", paths, lambda: _read(cert=cert, key=key, client_ca=client_ca), on_stale=on_stale
    )
    used = files.get()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        # Called by grpc in its own thread, one connection at a time. None, which the type stubs lack, keeps the present
        # credentials.
        nonlocal used
        before, used = used, files.get()
        return None if used is before else used

    return grpc.dynamic_ssl_server_credentials(used, newer, client_ca is not None)  # type: ignore[arg-type]


def server_context(*, cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Return a server's context, which requires client certificates if there is a CA of theirs."""
    # Errors of a file that is missing or not private are clearer than those of OpenSSL.
    read_file(cert, setting="security.tls_cert")
    read_secret(key, setting="security.tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"security.tls_cert, security.tls_key: {cert} and {key} are not a PEM certificate and its key"
            f" without a passphrase: {error}"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=read_file(client_ca, setting="security.client_ca").decode("ascii"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"security.client_ca: {client_ca} is not a PEM certificate: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read(*, cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCertificateConfiguration:
    # grpc accepts invalid files, and then fails each connection without a reason.
    server_context(cert=cert, key=key, client_ca=client_ca)
    cert_pem = read_file(cert, setting="security.tls_cert")
    key_pem = read_secret(key, setting="security.tls_key")
    ca_pem = read_file(client_ca, setting="security.client_ca") if client_ca else None
    return grpc.ssl_server_certificate_configuration([(key_pem, cert_pem)], root_certificates=ca_pem)


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
