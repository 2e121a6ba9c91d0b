"""Sources of settings, their precedence, and the errors for mistakes."""

import ast
import inspect
import os
import pwd
import re
from pathlib import Path

import pytest

from envd.base import config, config_values
from envd.base.config import Config, PoolConfig, RunShare
from envd.base.config_sources import fields, load, parse_pool_flags
from envd.base.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "envd.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(tmp_path: Path, text: str, **sources: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file=write(tmp_path, text), environ=sources.get("environ"), flags=sources.get("flags"))
    return str(caught.value)


def test_under_sudo_the_cache_is_that_of_the_invoking_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    user = pwd.struct_passwd(("ada", "x", 1234, 1234, "", str(tmp_path / "ada"), "/bin/sh"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", {"ada": user}.__getitem__)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "root")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, owner in (("ada", "ada"), ("root", "root"), ("", "root"), ("gone", "root")):
        monkeypatch.setenv("SUDO_USER", name)
        assert config_values.default_cache_dir() == tmp_path / owner / ".cache/envd"


def test_flags_win_over_the_environment_and_both_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[limits]\nmax_steps = 1\nlease_ttl_s = 10\nsetup_timeout_s = 5.5\n")
    environ = {"ENVD_LIMITS__MAX_STEPS": "2", "ENVD_LIMITS__LEASE_TTL_S": "20"}
    limits = load(file=file, environ=environ, flags={"limits.max_steps": 3}).limits
    assert (limits.setup_timeout_s, limits.lease_ttl_s, limits.max_steps) == (5.5, 20.0, 3)
    assert load(file=write(tmp_path, 'listen = "127.0.0.1:1234"'), flags={"listen": None}).listen == "127.0.0.1:1234"


def test_a_pool_flag_resizes_the_pool_of_the_file_and_keeps_the_rest(tmp_path: Path) -> None:
    file = write(tmp_path, "[pools.desktop]\nmemory_mib = 2048\nsize = 1\n[pools.other]\nimage = 'desktop'\n")
    pools = load(file=file, flags={"pools": parse_pool_flags(["2"])}).pools
    assert (pools["desktop"].size, pools["desktop"].memory_mib, pools["desktop"].image) == (2, 2048, "desktop")
    assert (pools["other"].size, pools["other"].image) == (1, "desktop")


@pytest.mark.parametrize(
    ("value", "suites"),
    [
        ("/a/one.yaml:web=/b/x=two.parquet", ("/a/one.yaml", "web=/b/x=two.parquet")),
        ("builtin:windows:/a/one.yaml", ("builtin:windows", "/a/one.yaml")),
        (
            "one.yaml:web=two.parquet:./a=b.json",
            (f"{Path.cwd()}/one.yaml", f"web={Path.cwd()}/two.parquet", f"{Path.cwd()}/a=b.json"),
        ),
    ],
)
def test_suites_are_separated_by_colons_in_the_environment(value: str, suites: tuple[str, ...]) -> None:
    assert load(environ={"ENVD_TASKS__SUITES": value}).tasks.suites == suites


def test_an_unknown_key_is_refused_with_all_other_mistakes(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[pools.desktop]\nsise = 2\n")
    assert message == f"{tmp_path}/envd.toml: pools.desktop.sise: unknown key; did you mean size?"
    message = refusal(tmp_path, "colour = 1\n[limits]\nmax_steps = 0\n")
    assert "colour: unknown key" in message
    assert "limits.max_steps: must be at least 1" in message


def test_a_bad_value_names_the_source_that_set_it(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[limits]\nmax_steps = 5\n", environ={"ENVD_LIMITS__MAX_STEPS": "many"})
    assert message.startswith("ENVD_LIMITS__MAX_STEPS: limits.max_steps: ")
    flag = refusal(tmp_path, "", flags={"metrics_listen": "127.0.0.1:70000"})
    assert (
        flag == "--metrics-listen: metrics_listen: port 70000 is above 65535; choose a smaller one, or 0 for a free one"
    )


def test_a_misspelt_variable_is_refused_and_foreign_ones_are_ignored() -> None:
    with pytest.raises(ConfigError, match=r"ENVD_METRIC_LISTEN: .*ENVD_METRICS_LISTEN"):
        load(environ={"ENVD_METRIC_LISTEN": "127.0.0.1:1"})
    assert load(environ={"ENVD_SERVICE_HOST": "10.0.0.1", "ENVD_PORT_50051_TCP_ADDR": "10.0.0.1"}) == load()


def test_a_missing_or_malformed_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, "listen = ").startswith(f"{tmp_path}/envd.toml: not valid TOML: ")
    with pytest.raises(ConfigError, match=r"/none\.toml:"):
        load(file=tmp_path / "none.toml")


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:50051", "[::]:50051", "example:1", "127.0.0.1", "127.0.0.1:x", ":50051", "unix:"]
)
def test_only_loopback_addresses_are_accepted(listen: str) -> None:
    with pytest.raises(ConfigError, match="only loopback is served"):
        load(flags={"listen": listen})


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "127.1.2.3:9", "localhost:50051", "[::1]:50051", "unix:/run/envd.sock"]
)
def test_every_loopback_form_is_accepted(listen: str) -> None:
    assert load(flags={"listen": listen}).listen == listen


def test_a_pool_flag_is_a_count_for_an_image_and_a_variable_names_the_pool() -> None:
    assert parse_pool_flags(["2", "win11=4"]) == {"desktop": {"size": 2}, "win11": {"size": 4}}
    assert load(environ={"ENVD_POOLS__WIN__SIZE": "4"}).pools == {"win": PoolConfig(image="win", size=4)}


@pytest.mark.parametrize("spec", ["", "x", "desktop=", "=2", "desktop=-1", "desktop=two"])
def test_a_malformed_or_repeated_pool_flag_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="--pool desktop=2"):
        parse_pool_flags([spec])
    with pytest.raises(ConfigError, match="'desktop'"):
        parse_pool_flags(["2", "desktop=3"])


def test_episodes_are_parked_only_where_machines_are_fewer_and_stop() -> None:
    assert not PoolConfig(image="a", size=1, capacity=4).parks
    assert PoolConfig(image="a", size=1, capacity=4, resident=2).parks
    for settings, message in (
        ({"capacity": 2, "resident": 3}, r"resident 3 is above capacity 2"),
        ({"size": 2, "capacity": 4, "resident": 1}, r"resident 1 is below size 2"),
        ({"capacity": 4, "resident": 1, "always_running": True}, r"always_running guests cannot be parked"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(flags={"pools": {"a": settings}})


def test_sizes_and_bounds_of_a_pool_must_agree() -> None:
    assert PoolConfig(image="a", size=3).capacity == 3
    assert PoolConfig(image="a", size=0).capacity == 1
    assert PoolConfig(image="a", size=1, capacity=4).capacity == 4
    assert PoolConfig(image="a", size=1, capacity=4).resident == 4
    with pytest.raises(ConfigError, match=r"capacity 1 .*size 2"):
        load(flags={"pools": {"a": {"size": 2, "capacity": 1}}})
    with pytest.raises(ConfigError, match="'My Pool'"):
        load(flags={"pools": {"My Pool": {"size": 1, "image": "desktop"}}})
    with pytest.raises(ConfigError, match=r"min_ms 10 .*max_ms 5"):
        load(flags={"pools": {"a": {"settle": {"min_ms": 10, "max_ms": 5}}}})
    with pytest.raises(ConfigError, match=r"lease_ttl_s 600 .*lease_ttl_max_s 60"):
        load(flags={"limits.lease_ttl_s": 600, "limits.lease_ttl_max_s": 60})


def test_a_screen_is_width_times_height_in_pixels() -> None:
    assert PoolConfig(image="a").screen is None
    assert load(flags={"pools": {"a": {"screen": "1920x1080"}}}).pools["a"].screen == (1920, 1080)
    with pytest.raises(ConfigError, match="'1920'"):
        load(flags={"pools": {"a": {"screen": "1920"}}})


def test_templates_are_under_the_state_directory_by_default() -> None:
    assert load(flags={"state_dir": "/srv/envd"}).template_dir == Path("/srv/envd/templates")
    moved = load(environ={"ENVD_HYPERVISOR__TEMPLATE_DIR": "/big", "ENVD_HYPERVISOR__TEMPLATE_MEMORY_DIR": "/shm"})
    assert (moved.template_dir, moved.hypervisor.template_memory_dir) == (Path("/big"), Path("/shm"))


def test_the_translation_cache_of_forks_is_bounded() -> None:
    with pytest.raises(ConfigError, match=r"hypervisor\.tcg_cache_mib: .*4096"):
        load(flags={"hypervisor.tcg_cache_mib": 5000})


def test_runs_have_weights_and_quotas_by_name(tmp_path: Path) -> None:
    file = write(tmp_path, "[limits.runs.main]\nweight = 2.0\n[limits.runs.default]\nquota = 8\n")
    runs = load(file=file, environ={"ENVD_LIMITS__RUNS__SWEEP__QUOTA": "4"}).limits.runs
    assert runs == {"main": RunShare(weight=2.0), "default": RunShare(quota=8), "sweep": RunShare(quota=4)}
    assert (runs["main"].quota, runs["default"].weight) == (None, 1.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[limits.runs.main]\nwieght = 2.0\n", "limits.runs.main.wieght: unknown key; did you mean weight?"),
        ("[limits.runs.main]\nweight = 0\n", "limits.runs.main.weight: must be at least"),
        ("[limits.runs.main]\nquota = 0\n", "limits.runs.main.quota: must be at least 1"),
        ("[limits.runs.'a b']\nquota = 1\n", "run name 'a b' is not 1 to 64 of A-Z a-z 0-9 . _ -"),
        ("[limit]\nmax_steps = 1\n", "limit: unknown key; did you mean limits?"),
        ('[security]\ntoken_file = "/x"\n', "security.token_file: unknown key; did you mean tokens_file?"),
        ("[limits.run.main]\nquota = 1\n", "limits.run: unknown key; did you mean runs?"),
        ("[limits.runs.main]\nweight = -1\n", "limits.runs.main.weight: must be at least"),
        ("[limits.runs.main]\nweight = inf\n", "limits.runs.main.weight: must be"),
        ("[pools.a]\nfailing_after = 0\n", "pools.a.failing_after: must be at least 1"),
        ("[pools.a]\ncapacity = 0\n", "pools.a.capacity: must be at least 1"),
        ("[pools.a]\nmax_starting = 0\n", "pools.a.max_starting: must be at least 1"),
        ("[pools.a]\nexpected_memory_mib = 0\n", "pools.a.expected_memory_mib: must be at least"),
        ("[pools.a]\ntask_templates = -1\n", "pools.a.task_templates: must be at least 0"),
        (
            "[pools.a]\nkeyboard_layout = 'de; reboot'\n",
            "pools.a.keyboard_layout: 'de; reboot' is not a keyboard layout",
        ),
        ("[pools.a]\nqueue_limit = -1\n", "pools.a.queue_limit: must be at least 0"),
    ],
)
def test_an_unknown_or_out_of_range_setting_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    assert complaint in refusal(tmp_path, text)


def test_a_config_cannot_be_changed_once_loaded() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().listen = "127.0.0.1:1"


def test_every_setting_has_a_description() -> None:
    assert {"listen", "limits.max_steps", "pools.NAME.settle.quiet_ms"} <= set(fields())
    sections = [each for each in ast.parse(inspect.getsource(config)).body if isinstance(each, ast.ClassDef)]
    described = [
        (f"{section.name}.{ast.unparse(field.target)}", following)
        for section in sections
        for field, following in zip(section.body, [*section.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
    ]
    assert {"Config.listen", "LimitsConfig.max_steps", "SettlePolicy.quiet_ms"} <= dict(described).keys()
    assert [name for name, following in described if not is_sentence(following)] == []


def is_sentence(node: ast.stmt | None) -> bool:
    """Return whether a node is the description of the field before it."""
    text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
    return isinstance(text, str) and text.endswith(".")


TLS = {"tls_cert": "/c/server.pem", "tls_key": "/c/server.key"}


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "192.0.2.7:1", "pool.example.org:50051"])
@pytest.mark.parametrize("callers", [{"tokens_file": "/c/tokens"}, {"client_ca": "/c/ca.pem"}])
def test_other_hosts_may_connect_with_tls_and_authentication(listen: str, callers: dict[str, str]) -> None:
    config = load(flags={"listen": listen, "security": TLS | callers})
    assert config.listen == listen


@pytest.mark.parametrize("security", [{}, TLS, {"tokens_file": "/c/tokens"}])
def test_other_hosts_are_refused_without_tls_or_authentication(security: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0:1' .*security\.tls_cert"):
        load(flags={"listen": "0.0.0.0:1", "security": security})


@pytest.mark.parametrize("listen", ["0.0.0.0:70000", "192.0.2.7", "a b:1", "::1:5", "[::1:5", "http://a:1"])
def test_a_malformed_address_is_refused_with_tls(listen: str) -> None:
    with pytest.raises(ConfigError, match="listen: "):
        load(flags={"listen": listen, "security": TLS | {"client_ca": "/c/ca.pem"}})


def test_metrics_leave_loopback_only_with_tls_and_authentication() -> None:
    with pytest.raises(ConfigError, match=r"metrics_listen '0\.0\.0\.0:9464'"):
        load(flags={"metrics_listen": "0.0.0.0:9464", "security": TLS})
    config = load(flags={"metrics_listen": "0.0.0.0:9464", "security": TLS | {"tokens_file": "/c/tokens"}})
    assert config.metrics_listen == "0.0.0.0:9464"


def test_protocols_get_their_usual_ports_on_loopback_by_default() -> None:
    assert load().compat_addresses == {}
    assert load(flags={"compat": "areal,slime-osworld=[::1]:0"}).compat_addresses == {
        "areal": "127.0.0.1:8000",
        "slime-osworld": "[::1]:0",
    }


@pytest.mark.parametrize(
    ("compat", "message"),
    [
        ("aeral", "'aeral' is not a protocol; use slime-osworld, areal, areal-sandbox, windows-vm"),
        ("areal,areal=127.0.0.1:1", "names a protocol twice"),
        ("areal=nowhere", "'nowhere' is not HOST:PORT on loopback"),
        ("areal=0.0.0.0:8000", "compat '0.0.0.0:8000' can be reached from other hosts"),
    ],
)
def test_a_wrong_protocol_or_address_is_refused(compat: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(flags={"compat": compat})


def test_certificate_and_key_belong_together() -> None:
    with pytest.raises(ConfigError, match=r"tls_cert .*tls_key"):
        load(flags={"security.tls_cert": "/c/server.pem"})
    with pytest.raises(ConfigError, match="client_ca needs tls_cert and tls_key"):
        load(flags={"security.client_ca": "/c/ca.pem"})


def test_security_can_be_set_by_environment_and_a_client_token_is_not_a_setting() -> None:
    environ = {"ENVD_SECURITY__TOKENS_FILE": "/run/secrets/tokens", "ENVD_SECURITY__CALLS_PER_SECOND": "0"}
    config = load(environ={**environ, "ENVD_TOKEN": "envd_secret-1234"})
    assert config.security.tokens_file == Path("/run/secrets/tokens")
    assert config.security.calls_per_second == 0.0
    assert "secret-1234" not in repr(config)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('web = "record"', "web 'record' needs the name of a recording; set recording"),
        ('recording = "shop"', "recording 'shop' is not used by web 'closed'; set web, or remove it"),
        ('web = "replay"\nrecording = "a"\nallowed_hosts = ["b.test"]', "web 'replay' reaches no host"),
        ('web = "replay"\nrecording = "../a"', "'../a' is not 1 to 63 of a-z"),
        ('web = "open"', "pools.a.web"),
    ],
)
def test_a_pool_has_a_recording_exactly_if_it_records_or_replays(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in refusal(tmp_path, f"[pools.a]\n{text}\n")
