# The daemon. Build from the root of the repository: docker build -f docker/envd.Dockerfile -t envd .
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libvirt-dev pkg-config python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/envd/.venv && /opt/envd/.venv/bin/pip install --no-cache-dir '.[host,otlp,video]'

FROM ${BASE}
# The embedded libvirt driver runs QEMU inside the daemon's process tree: no libvirtd. mmdebstrap builds guest images.
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      qemu-system-x86 qemu-utils libvirt-daemon-driver-qemu libvirt0 ovmf seabios swtpm swtpm-tools \
      mmdebstrap debian-archive-keyring e2fsprogs runc uidmap python3 tini \
 && rm -rf /var/lib/apt/lists/*
# libvirt's default user of QEMU, which Debian's libvirtd package makes, and envd's.
RUN getent group kvm || groupadd --system kvm \
 && groupadd --system --gid 64055 libvirt-qemu \
 && useradd --system --uid 64055 --gid kvm --groups libvirt-qemu --no-create-home libvirt-qemu
COPY --from=build /opt/envd/.venv /opt/envd/.venv
COPY docs /opt/envd/docs
ENV PATH=/opt/envd/.venv/bin:$PATH ENVD_STATE_DIR=/var/lib/envd ENVD_CACHE_DIR=/var/cache/envd
VOLUME ["/var/lib/envd", "/var/cache/envd"]
EXPOSE 50051 9464
# SIGTERM drains: stop with a timeout of at least limits.drain_timeout_s and a minute.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
ENTRYPOINT ["tini", "--", "envd"]
CMD ["serve", "--pool", "2"]
