"""Disk space and certificates in the metrics."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from envd.base.telemetry.host import HostCollector
from envd.cli.certs import make_development_certs


def values(collector: HostCollector) -> dict[tuple[str, ...], float]:
    """Return the samples by series and label value."""
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_the_disk_of_a_directory_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    shown = values(
        HostCollector(
            directories={"state": tmp_path, "cache": tmp_path / "later" / "x"}, certificates={}, memory=lambda: 7
        )
    )
    assert 0 < shown["envd_disk_free_bytes", "state"] < shown["envd_disk_size_bytes", "state"]
    assert shown["envd_disk_size_bytes", "cache"] == shown["envd_disk_size_bytes", "state"]
    assert shown["envd_host_memory_available_bytes",] == 7


def test_the_expiry_is_that_of_the_first_certificate_that_expires(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    soon, late = (make_development_certs(["localhost"], now=now + timedelta(days=days))["server"] for days in (0, 30))
    chain = tmp_path / "chain.pem"
    chain.write_bytes(late + soon)
    shown = values(HostCollector(directories={}, certificates={"tls_cert": chain}, memory=lambda: 7))
    expiry = datetime.fromtimestamp(shown["envd_certificate_expiry_timestamp_seconds", "tls_cert"], UTC)
    assert expiry == x509.load_pem_x509_certificate(soon).not_valid_after_utc


def test_a_file_that_is_not_a_certificate_has_no_expiry(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("not a certificate")
    collector = HostCollector(
        directories={}, certificates={"tls_cert": broken, "client_ca": tmp_path / "missing.pem"}, memory=lambda: 7
    )
    assert [name for name, *_ in values(collector) if "expiry" in name] == []
