"""The operator's settings: sections, defaults, bounds. `envd.base.config_sources` reads them.

Unknown keys are refused. Nothing here touches the host.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator

from cuaenv.actions import Tool
from cuaenv.region import Region
from envd.base.config_values import (
    AllowedHost,
    CommaList,
    CompatEndpoint,
    ConsoleListen,
    Directory,
    HostPort,
    HttpUrl,
    HypervisorUri,
    KeyboardLayout,
    Listen,
    PathList,
    Screen,
    ScreenRegion,
    TaskFile,
    default_cache_dir,
    default_state_dir,
    is_local,
)
from envd.base.errors import InvalidRequest

DEFAULT_IMAGE = "desktop"
MAX_MACHINES = 4096
#: Shortest lease of an episode: a shorter one would expire during a network hiccup.
LEASE_TTL_MIN_S = 10.0

_RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Names of images are names of directories.
_IMAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_POOL_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?")

#: Name of the entry in `limits.runs` that applies to every run without an entry.
DEFAULT_RUN = "default"


def check_image_name(name: str) -> str:
    """Return the name of an image. Raises: ValueError: It is none."""
    if not _IMAGE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit")
    return name


def check_recording_name(name: str) -> str:
    """Return the name of a web recording, or none. Raises: ValueError: It is invalid."""
    return name and check_image_name(name)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class SettlePolicy(_Section):
    """When a screen counts as settled after input. Times in milliseconds."""

    quiet_ms: int = Field(default=300, ge=0, le=60_000)
    """Time without a screen change after which the screen counts as settled."""
    idle_ms: int = Field(default=40, ge=0, le=60_000)
    """Time without a screen change that suffices if the guest's processors handled the input and were then idle for as
    long; 0 for a fixed quiet time. Enter, space, and keys with Alt always have the fixed quiet time."""
    min_ms: int = Field(default=0, ge=0, le=60_000)
    """Shortest time from a step's last input to its response."""
    max_ms: int = Field(default=5_000, ge=0, le=300_000)
    """Longest time from a step's last input to its response, even if the screen still changes."""
    # Databases of earlier releases have `ignored`.
    ignored_regions: Annotated[
        tuple[ScreenRegion, ...], CommaList, Field(validation_alias=AliasChoices("ignored_regions", "ignored"))
    ] = ()
    """Regions whose changes do not count, such as a clock: each WIDTHxHEIGHT+X+Y in pixels."""

    def ignoring(self, more: tuple[Region, ...]) -> Self:
        """Return this policy with more ignored regions."""
        regions = tuple(dict.fromkeys((*self.ignored_regions, *more)))
        return self.model_copy(update={"ignored_regions": regions}) if more else self

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_ms > self.max_ms:
            raise ValueError(f"min_ms {self.min_ms} is above max_ms {self.max_ms}; raise max_ms, or lower min_ms")
        return self


class PoolConfig(_Section):
    """One pool: equal machines of one image."""

    image: Annotated[str, AfterValidator(check_image_name)] = Field(default="", validate_default=False)
    """Name of an image in the catalogue. Default: the pool's own name."""
    size: int = Field(default=1, ge=0, le=MAX_MACHINES)
    """Spare machines: started ahead of demand, they only load a state for a reset or a branch."""
    capacity: int = Field(default_factory=lambda data: max(1, data["size"]), ge=1, le=MAX_MACHINES)
    """Maximum episodes that are open at once. Default: `size`, at least 1."""
    resident: int = Field(default_factory=lambda data: data["capacity"], ge=1, le=MAX_MACHINES)
    """Most machines at once: ready, leased, starting and dying together. Below `capacity`, episodes that wait for their
    model are parked: their state goes to the disk, and comes back at their next call. Default: `capacity`."""
    max_starting: int = Field(default_factory=lambda: max(2, os.cpu_count() or 1), ge=1, le=MAX_MACHINES)
    """Maximum machines that are forked at the same time. Default: the number of the host's cores, at least 2."""
    memory_mib: int = Field(default=1024, ge=128, le=1_048_576)
    """Memory of each machine, in MiB. Unchanged memory is shared between machines."""
    expected_memory_mib: int = Field(default=256, ge=16, le=1_048_576)
    """Memory in MiB that a used machine is expected to hold for itself; no machine is forked that the host could not
    give this much."""
    disk_quota_mib: int = Field(default=8192, ge=64, le=1_073_741_824)
    """Disk of the host in MiB that a machine's own files may use. A machine that writes more is lost."""
    vcpu_count: int = Field(default=2, ge=1, le=256)
    """Virtual processors of each machine."""
    screen: Screen | None = None
    """Screen of each machine, WIDTHxHEIGHT in pixels. Default: the image's own, such as 1280x800."""
    keyboard_layout: KeyboardLayout = ""
    """Keyboard layout of the session, as XKB names it: `de`, `us(intl)`, `us,ru`. Linux images with guestd only.
    Default: the image's own, such as `us`."""
    always_running: bool = False
    """Whether a guest, once used, runs between calls. By default it is paused: a screen does not change while the agent
    thinks, and an idle episode uses no CPU."""
    task_templates: int = Field(default=8, ge=0, le=1024)
    """Maximum number of tasks whose state after setup is kept frozen, to fork later episodes from; 0 for none."""
    allowed_hosts: tuple[AllowedHost, ...] = ()
    """Hosts that guests may reach, through a proxy on their loopback: `example.org`, `*.example.org`,
    `example.org:8443`; ports 80 and 443 if none is given. Private addresses must be listed as addresses. Empty for
    none."""
    web: Literal["closed", "allow", "record", "replay"] = "closed"
    """What else guests reach: `closed` for nothing; `allow` for ports 80 and 443 of every public host; `record` for the
    same, recorded; `replay` for the pages of a recording alone, without a network."""
    recording: Annotated[str, AfterValidator(check_recording_name)] = ""
    """Name of the web recording of `web = "record"` or `"replay"`."""
    allow_guest_access: bool = False
    """Whether clients may read and write guest files, run guest commands and connect to guest ports."""
    tools: tuple[Tool, ...] = ()
    """Tools that agents may use in any task: `shell`, `files`, `mcp`, `ask_user`. A task may allow more."""
    queue_limit: int = Field(default=256, ge=0, le=1_000_000)
    """Maximum reset and fork requests that may wait for machines; further ones are refused with a retry time."""
    failing_after: int = Field(default=6, ge=1, le=1000)
    """Consecutive failed machine starts before resets are refused until one succeeds. Pauses between attempts double
    from 1 s to 60 s, one machine at a time."""
    boot_timeout_s: float = Field(default=600.0, gt=0, le=7200)
    """Longest time in seconds from starting a machine to a settled desktop, when the pool's template is booted."""
    settle: SettlePolicy = SettlePolicy()
    """The rule by which a screen counts as settled, unless the client overrides it."""

    @model_validator(mode="after")
    def _has_room_for_spare_machines(self) -> Self:
        if self.capacity < self.size:
            raise ValueError(f"capacity {self.capacity} is below size {self.size}; raise capacity, or lower size")
        return self

    @property
    def parks(self) -> bool:
        """Whether more episodes may be open than machines in memory."""
        return self.resident < self.capacity

    @model_validator(mode="after")
    def _parks_what_can_be_parked(self) -> Self:
        if self.resident > self.capacity:
            raise ValueError(f"resident {self.resident} is above capacity {self.capacity}; raise capacity")
        if self.resident < self.size:
            raise ValueError(f"resident {self.resident} is below size {self.size}; raise resident, or lower size")
        if self.parks and self.always_running:
            raise ValueError("resident is below capacity, but always_running guests cannot be parked; remove one")
        return self

    @model_validator(mode="after")
    def _only_recorded_webs_have_a_recording(self) -> Self:
        if self.web in {"record", "replay"} and not self.recording:
            raise ValueError(f"web {self.web!r} needs the name of a recording; set recording")
        if self.recording and self.web not in {"record", "replay"}:
            raise ValueError(f"recording {self.recording!r} is not used by web {self.web!r}; set web, or remove it")
        if self.web == "replay" and self.allowed_hosts:
            raise ValueError("web 'replay' reaches no host; remove allowed_hosts")
        return self


class HypervisorConfig(_Section):
    """The hypervisor."""

    uri: HypervisorUri = ""
    """`qemu:///embed?root=/DIR` (QEMU driver inside the daemon), `qemu:///system` (a libvirtd; another socket:
    `qemu+unix:///system?socket=/PATH`), `oci:` (containers by runc; `oci:RUNTIME` for another OCI runtime), or `fake`
    (drawn desktops, no guest). Default: embed under `state_dir`."""
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    """`kvm`, `tcg`, or `auto`: KVM where a probe shows that it runs guest code, else TCG."""
    qemu_user: str = ""
    """User that runs QEMU when root runs envd with the embedded driver. Default: `libvirt-qemu` or `qemu` if that user
    can access all that machines need, else root; `envd doctor` reports which, and why."""
    template_dir: Directory | None = None
    """Directory of stored templates, kept when the daemon ends; the daemons of a host may share it. Default:
    `templates` under `state_dir`."""
    template_memory_dir: Directory | None = None
    """Directory of the templates' memory files; a tmpfs such as /dev/shm keeps them in memory. Default: with the other
    template files."""
    template_limit_gib: float = Field(default=40.0, gt=0, le=1_048_576)
    """Maximum disk space in GiB for stored templates; the least recently used are removed first."""
    tcg_cache_mib: int = Field(default=64, ge=1, le=4096)
    """Maximum memory in MiB of each machine's translated code, without KVM."""
    reaction_ms: int = Field(default=0, ge=0, le=10_000)
    """Drawn desktops only: their programs react to each input after up to this many milliseconds, as slow programs
    do."""

    @property
    def template_limit_bytes(self) -> int:
        return int(self.template_limit_gib * (1 << 30))


class RunShare(_Section):
    """The share of one run in each pool: of resets and forks with its label. `default` applies to every other run."""

    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """The run's share of a pool's machines, relative to the weights of other runs that wait."""
    quota: int | None = Field(default=None, ge=1, le=MAX_MACHINES)
    """Maximum machines of a pool that the run may hold. Default: `resident` of the pool."""

    def most(self, resident: int) -> int:
        """Return the most machines that the run may hold out of `resident`."""
        return resident if self.quota is None else min(self.quota, resident)


class LimitsConfig(_Section):
    """Defaults and bounds of episodes, and bounds on the use of the host."""

    memory_reserve_mib: int = Field(default=1024, ge=0, le=1_048_576)
    """Memory in MiB that stays available on the host, also when all machines have grown as expected: no machine is
    forked beyond that."""
    disk_reserve_mib: int = Field(default=2048, ge=0, le=1_073_741_824)
    """Space in MiB that stays free on the disk of `state_dir`: no machine is forked while less is free, and none leased
    below 64 MiB; 0 for neither."""
    lease_ttl_s: float = Field(default=300.0, ge=LEASE_TTL_MIN_S, le=3600)
    """Seconds without a call after which an episode's machine is reclaimed, if the client sets none."""
    lease_ttl_max_s: float = Field(default=3600.0, ge=LEASE_TTL_MIN_S, le=3600)
    """Longest lease in seconds that a client may request."""
    max_steps: int = Field(default=1000, ge=1, le=100_000)
    """Maximum steps of an episode, regardless of its task or client."""
    setup_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time in seconds for a task's setup."""
    evaluate_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time in seconds for all of a task's checkers together."""
    heartbeat_interval_s: float = Field(default=60.0, ge=0)
    """Seconds without a response after which a guest is pinged during its next step."""
    hang_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a guest has to answer that ping; then it counts as hung, and its episode is void."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Seconds that live episodes have to end after SIGTERM."""
    audit_interval_s: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds between two audits for leftovers: domains, processes, overlays, sockets, memory files, database rows.
    Leftovers of five minutes are removed."""
    runs: dict[str, RunShare] = {}
    """Weights and quotas of runs by name; `default` applies to every run that is not named."""

    @model_validator(mode="after")
    def _run_names_are_labels(self) -> Self:
        for name in self.runs:
            if not _RUN_NAME.fullmatch(name):
                raise ValueError(f"run name {name!r} is not 1 to 64 of A-Z a-z 0-9 . _ -; use the clients' label")
        return self

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lease_ttl_s > self.lease_ttl_max_s:
            raise ValueError(
                f"lease_ttl_s {self.lease_ttl_s:g} is above lease_ttl_max_s {self.lease_ttl_max_s:g}; lower lease_ttl_s"
            )
        return self

    def lease_ttl_for(self, requested_s: float | None) -> float:
        """Return the lease length of a request in seconds. Raises: InvalidRequest: out of range."""
        if requested_s is None:
            return self.lease_ttl_s
        if not LEASE_TTL_MIN_S <= requested_s <= self.lease_ttl_max_s:
            raise InvalidRequest(
                "lease_ttl", f"{requested_s:g} s is outside [{LEASE_TTL_MIN_S:g} s, {self.lease_ttl_max_s:g} s]"
            )
        return requested_s

    def max_steps_for(self, requested: int | None, *, task_max_steps: int) -> int:
        """Return the maximum steps of an episode. Raises: InvalidRequest: out of range."""
        if requested is None:
            return min(task_max_steps, self.max_steps)
        if not 1 <= requested <= self.max_steps:
            raise InvalidRequest("max_steps", f"{requested} is outside [1, {self.max_steps}]")
        return requested


class TasksConfig(_Section):
    """The served tasks."""

    suites: Annotated[tuple[TaskFile, ...], PathList] = ()
    """Task files to load in addition to the built-in suite, each `PATH`, or `SUITE=PATH` if the file's format has no
    suites; or `builtin:windows`, a suite for Windows; or `builtin:tools`, a suite with tools. `cua-gym:DIR` is a
    directory of CUA-Gym bundles, `opencomputer:DIR` a checkout of OpenComputer. In the environment, separated by
    `:`."""
    allow_download: bool = False
    """Whether files that tasks need, and that `envd tasks fetch` did not fetch, are downloaded while an episode
    waits."""
    check_obstacles: bool = True
    """Whether OSWorld tasks that cannot run on this host, by `envd osworld lint`, are listed as such and refused."""
    client_password_file: Directory | None = None
    """File with the password of the guests' user, for setups that name `{CLIENT_PASSWORD}`; it must not be readable by
    others."""
    user_url: Annotated[str, Field(pattern=r"^$|^https?://[^\s@?#]+$")] = ""
    """Base URL of OpenAI-compatible chat completions, such as `http://127.0.0.1:8000/v1`, that play the users of tasks
    with a `persona`."""
    user_model: str = ""
    """Name of the model at `tasks.user_url`."""
    user_key_file: Directory | None = None
    """File with the key of `tasks.user_url`."""
    user_timeout_s: Annotated[float, Field(gt=0, le=60)] = 60.0
    """Seconds that an answer may take, attempts included; at most 60. After that the user does not know, or the episode
    is void if envd's own question gets no answer either."""


class RecordingConfig(_Section):
    """Recordings of episodes: screens and steps, for replays. Typed secrets are recorded like everything else."""

    directory: Directory | None = None
    """Directory of recordings of all episodes. Default: none, and nothing is recorded."""
    limit_gib: float = Field(default=20.0, gt=0, le=1_048_576)
    """Maximum disk space in GiB for recordings; the oldest are dropped first."""
    min_free_gib: float = Field(default=5.0, ge=0, le=1_048_576)
    """Space in GiB that recordings leave free on their disk. With less, recording stops with an alert, and episodes
    continue."""
    max_rate_hz: float = Field(default=5.0, gt=0, le=60)
    """Maximum frames per second between steps. The screen after each step is always recorded."""


class CheckpointsConfig(_Section):
    """Stored states of episodes, in `cache_dir`, which several daemons of a host may share."""

    limit_gib: float = Field(default=20.0, gt=0, le=1_048_576)
    """Maximum disk space in GiB for checkpoints of all daemons of the host, in equal shares of the tokens; of the token
    that holds most, those not used for longest are removed first."""
    run_limit_gib: float = Field(default=10.0, gt=0, le=1_048_576)
    """Maximum disk space in GiB for the checkpoints of one run of a token."""
    ttl_s: float = Field(default=86_400.0, ge=10, le=31_536_000)
    """Seconds for which a checkpoint is kept, unless its request says otherwise."""


class SecurityConfig(_Section):
    """Authentication and rate limits. By default every process on this host may call."""

    tls_cert: Directory | None = None
    """PEM file of the server's certificate chain. If replaced while envd runs, it is used from the next connection
    on."""
    tls_key: Directory | None = None
    """PEM file of the certificate's private key, without a passphrase; it must not be readable by others."""
    client_ca: Directory | None = None
    """PEM file of the authority whose client certificates are accepted; connections without one are then refused."""
    tokens_file: Directory | None = None
    """File of the accepted tokens, as `envd tokens new` prints its lines; it must not be readable by others. If
    replaced while envd runs, it applies from the next call on."""
    calls_per_second: float = Field(default=500.0, ge=0, le=1_000_000)
    """Calls per second that each token may make, or each host without tokens; 0 for no limit."""
    call_burst: int = Field(default=1000, ge=1, le=1_000_000)
    """Calls that may come at once, after a pause."""
    max_calls_in_flight: int = Field(default=1024, ge=1, le=1_000_000)
    """Calls of each token, or of each host without tokens, that may run at once. `KeepAlive` and `Close` count
    separately."""

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca needs tls_cert and tls_key; set them")
        return self

    @property
    def is_exposable(self) -> bool:
        """Whether other hosts may connect: connections are encrypted and callers authenticated."""
        return self.tls_cert is not None and (self.tokens_file is not None or self.client_ca is not None)


class TelemetryConfig(_Section):
    """Traces."""

    otlp_endpoint: HttpUrl = ""
    """URL of an OpenTelemetry collector's OTLP receiver for HTTP, such as `http://127.0.0.1:4318`, to which traces of
    calls are sent; empty for none. The standard `OTEL_...` variables apply to them."""


class Config(_Section):
    """All settings of an operator."""

    listen: Listen = "127.0.0.1:50051"
    """HOST:PORT of the gRPC service, port 0 for a free one, or `unix:PATH`. Loopback only, unless `security` has TLS,
    and tokens or client certificates."""
    metrics_listen: HostPort = "127.0.0.1:9464"
    """HOST:PORT of the Prometheus metrics, port 0 for a free one. Loopback is served in clear text without tokens;
    other addresses only over TLS, to tokens of any scope or client certificates."""
    console_listen: ConsoleListen = ""
    """HOST:PORT of the console, a page that shows every episode live; port 0 for a free one, empty for none. It uses
    the certificate and the tokens of `security`; a token of scope `read` sees the screens of all episodes."""
    compat: Annotated[tuple[CompatEndpoint, ...], CommaList] = ()
    """Protocols of other systems to serve, each `NAME` or `NAME=HOST:PORT`: `slime-osworld`, `areal`, `areal-sandbox`,
    `windows-vm`, `e2b`. Each is a process of its own, `envd compat`, with the certificate and the tokens of `security`.
    In the environment, separated by commas."""
    state_dir: Directory = Field(default_factory=default_state_dir)
    """Directory of one daemon's state: machines, overlays, sockets, QEMU logs."""
    cache_dir: Directory = Field(default_factory=default_cache_dir)
    """Directory of images; several daemons may share it."""
    log_format: Literal["text", "json"] = "text"
    """Log format on standard error: `text` or `json`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    hypervisor: HypervisorConfig = HypervisorConfig()
    """The hypervisor."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds of episodes and on the use of the host."""
    tasks: TasksConfig = TasksConfig()
    """The served tasks."""
    recording: RecordingConfig = RecordingConfig()
    """Recordings of episodes."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    """Stored states of episodes."""
    security: SecurityConfig = SecurityConfig()
    """Authentication and rate limits."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Traces."""
    pools: dict[str, PoolConfig] = {}
    """Pools by name."""

    @property
    def asset_dir(self) -> Path:
        """Directory of the files that tasks need."""
        return self.cache_dir / "assets"

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of the checkpoints."""
        return self.cache_dir / "checkpoints"

    @model_validator(mode="before")
    @classmethod
    def _images_default_to_the_pool_name(cls, data: object) -> object:
        pools = data.get("pools") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(pools, dict):
            return data
        named = {
            name: {"image": name, **pool} if isinstance(pool, dict) and _POOL_NAME.fullmatch(name) else pool
            for name, pool in pools.items()
        }
        return {**data, "pools": named}

    @model_validator(mode="after")
    def _pool_names_fit_machine_ids(self) -> Self:
        for name in self.pools:
            if not _POOL_NAME.fullmatch(name):
                raise ValueError(f"pool name {name!r} is not 1 to 24 of a-z, 0-9 and inner hyphens; rename the pool")
        return self

    @model_validator(mode="after")
    def _others_are_kept_out_or_known(self) -> Self:
        addresses = [
            ("listen", self.listen),
            ("metrics_listen", self.metrics_listen),
            ("console_listen", self.console_listen),
            *(("compat", address) for address in self.compat_addresses.values()),
        ]
        for name, address in addresses:
            if address and not is_local(address) and not self.security.is_exposable:
                raise ValueError(
                    f"{name} {address!r} can be reached from other hosts, and without TLS and tokens only loopback is"
                    " served; set security.tls_cert and security.tls_key, and security.tokens_file or"
                    " security.client_ca (`envd certs` and `envd tokens new` make them), or listen on 127.0.0.1 and"
                    " forward the port over ssh"
                )
        return self

    @model_validator(mode="after")
    def _compat_names_are_unique(self) -> Self:
        names = [each.partition("=")[0] for each in self.compat]
        if len(set(names)) < len(names):
            raise ValueError(f"compat: {', '.join(names)} names a protocol twice; name each once")
        return self

    @property
    def compat_addresses(self) -> dict[str, str]:
        return {name: address for name, _, address in (each.partition("=") for each in self.compat)}

    @property
    def template_dir(self) -> Path:
        return self.hypervisor.template_dir or self.state_dir / "templates"
