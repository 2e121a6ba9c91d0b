"""Series about what the daemon needs of its host: disk, memory, valid certificates. Read at each scrape."""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cryptography import x509
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)


class HostCollector(Collector):
    """Disk space of the daemon's directories, available memory, and the expiry of certificates."""

    def __init__(
        self, *, directories: Mapping[str, Path], certificates: Mapping[str, Path], memory: Callable[[], int]
    ) -> None:
        """Watch a host.

        Args:
            directories: By label `directory`.
            certificates: PEM files by label `setting`.
        """
        self._directories = dict(directories)
        self._certificates = dict(certificates)
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        """Yield the series. Left out are disks and files that cannot be read."""
        free = GaugeMetricFamily(
            "envd_disk_free_bytes",
            "Free space on the disk of a directory: state, cache, templates, template_memory.",
            labels=("directory",),
        )
        size = GaugeMetricFamily("envd_disk_size_bytes", "Size of the disk of a directory.", labels=("directory",))
        for name, directory in self._directories.items():
            try:
                # A directory that is made on first use is on the disk of its nearest parent.
                usage = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists()))
            except OSError as error:
                logger.warning("%s: free disk space is not known: %s", directory, error.strerror or error)
                continue
            free.add_metric((name,), usage.free)
            size.add_metric((name,), usage.total)
        expiry = GaugeMetricFamily(
            "envd_certificate_expiry_timestamp_seconds",
            "When the first certificate of the file expires, as a Unix time.",
            labels=("setting",),
        )
        for setting, path in self._certificates.items():
            try:
                certificates = x509.load_pem_x509_certificates(path.read_bytes())
            except (OSError, ValueError):
                continue  # envd_security_files_stale and a log line report it
            expiry.add_metric((setting,), min(each.not_valid_after_utc.timestamp() for each in certificates))
        available = GaugeMetricFamily(
            "envd_host_memory_available_bytes", "Memory that the host could give without swapping.", self._memory()
        )
        yield from (free, size, available, expiry)
