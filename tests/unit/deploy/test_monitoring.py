"""Rules and dashboard use series and labels that exist; every alert has a test and a section on its page."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from envd.base.telemetry.host import HostCollector
from envd.base.telemetry.metrics import Metrics
from envd.pool.status import POOL_SERIES

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "envd.rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "envd.json"

#: Added by Prometheus to each series of a scrape.
TARGET_LABELS = frozenset({"job", "instance"})
PROCESS_SERIES = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def exported() -> dict[str, set[str]]:
    """Return the labels of every series that a daemon can export, by the name that queries use."""
    metrics = Metrics(process=True)
    labels: dict[str, set[str]] = {"up": set()}
    for collector in vars(metrics).values():
        for family in collector.describe() if hasattr(collector, "describe") else ():
            names = set(collector._labelnames)
            if family.type == "counter":
                labels[f"{family.name}_total"] = names
            elif family.type == "histogram":
                labels |= {f"{family.name}_{part}": names | {"le"} for part in ("bucket", "sum", "count")}
            else:
                labels[family.name] = names
    labels |= {series.name: {"pool", series.label} - {""} for series in POOL_SERIES}
    host = HostCollector(directories={"state": ROOT}, certificates={}, memory=lambda: 0)
    labels |= {family.name: set(family._labelnames) for family in host.collect()}  # type: ignore[attr-defined]
    labels |= {name: set() for name in PROCESS_SERIES}
    return labels


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[str]:
    return [rule["alert"] for rule in rules() if "alert" in rule]


def dashboard_queries() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if (query := variable.get("query")) and isinstance(query, dict):
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", query["query"])
            assert match is not None
            yield f"count by ({match[2]}) ({match[1]})"


def plain(query: str) -> str:
    """Return a query with Grafana's variables replaced, so that it parses."""
    return query.replace("$__rate_interval", "5m")


def selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield the series of an expression with the labels that it filters and groups by."""
    if isinstance(node, promql_parser.VectorSelector):
        yield str(node.name), {matcher.name for matcher in node.matchers.matchers}
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from selectors(node.vector_selector)
    elif isinstance(node, promql_parser.AggregateExpr):
        grouping = set(node.modifier.labels) if node.modifier else set()
        for name, labels in selectors(node.expr):
            yield name, labels | grouping
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from selectors(node.lhs)
        yield from selectors(node.rhs)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument)
    elif isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr | promql_parser.SubqueryExpr):
        yield from selectors(node.expr)
    else:
        assert isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral), type(node)


def unknown(query: str, known: dict[str, set[str]]) -> list[str]:
    """Return the series and labels of a query that do not exist."""
    found: list[str] = []
    for name, labels in selectors(promql_parser.parse(plain(query))):
        if name not in known:
            found.append(name)
        else:
            found += [f"{name}{{{label}}}" for label in sorted(labels - known[name] - TARGET_LABELS)]
    return found


def test_every_rule_uses_series_and_labels_that_exist() -> None:
    known = exported()
    for rule in rules():
        if "record" in rule:
            level = set(rule["record"].partition(":")[0].split("_"))
            known[rule["record"]] = level
    assert len(rules()) > 20
    assert {rule.get("alert") or rule["record"]: unknown(rule["expr"], known) for rule in rules()} == {
        rule.get("alert") or rule["record"]: [] for rule in rules()
    }


def test_every_panel_uses_series_and_labels_that_exist() -> None:
    known = exported()
    queries = list(dashboard_queries())
    assert len(queries) > 40
    assert {query: found for query in queries if (found := unknown(query, known))} == {}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("sum by (shelf) (rate(envd_leftovers_total[5m]))", ["envd_leftovers_total{shelf}"]),
        ('envd_leases{colour="red"} > 0 and envd_nothing == 1', ["envd_leases{colour}", "envd_nothing"]),
        ("histogram_quantile(0.5, sum by (le) (rate(envd_leases[5m])))", ["envd_leases{le}"]),
    ],
)
def test_unknown_series_and_labels_are_found(query: str, found: list[str]) -> None:
    assert unknown(query, exported()) == found


def test_every_series_of_the_daemon_is_on_the_dashboard_or_in_a_rule() -> None:
    used = {
        name
        for query in [*dashboard_queries(), *(rule["expr"] for rule in rules())]
        for name, _ in selectors(promql_parser.parse(plain(query)))
    }
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()} - families == set()


def test_every_alert_has_a_severity_a_summary_and_a_section_on_its_page() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for rule in rules():
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"].endswith(f"docs/monitoring.md#{rule['alert'].lower()}")
        assert f"\n## {rule['alert']}\n" in page
    assert re.findall(r"^## (Envd\w+)$", page, re.MULTILINE) == alerts()


def promtool() -> str:
    found = shutil.which("promtool", path=str(Path(sys.executable).parent))
    assert found is not None, "promtool is missing in the virtual environment; run tests by make"
    return found


@pytest.mark.parametrize(("failed", "value"), [(None, 0), ("0+0x40", 0), ("0+1x40", 0.25)])
def test_the_panels_of_void_episodes_show_a_value_whether_any_failed_or_not(
    tmp_path: Path, failed: str | None, value: float
) -> None:
    found = [query for query in dashboard_queries() if 'state="failed"' in query and "ended_total" in query]
    assert len(found) == 2
    series = [{"series": 'envd_episodes_ended_total{pool="p", run="r", state="evaluated"}', "values": "0+3x40"}]
    if failed is not None:
        series.append({"series": 'envd_episodes_ended_total{pool="p", run="r", state="failed"}', "values": failed})
    checks = [
        {
            "expr": re.sub(r"\$\w+", ".*", query),
            "eval_time": "40m",
            "exp_samples": [{"labels": '{pool="p", run="r"}' if "by (" in query else "{}", "value": value}],
        }
        for query in found
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(
        [promtool(), "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_every_alert_fires_for_one_series_and_not_for_another() -> None:
    for command in (["check", "rules", RULES.name], ["test", "rules", "envd.rules.test.yaml"]):
        done = subprocess.run([promtool(), *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    cases = yaml.safe_load((PROMETHEUS / "envd.rules.test.yaml").read_text())["tests"]
    assert [case["name"] for case in cases] == alerts()
    for case in cases:
        instances = {re.search(r'instance="(\w)', series["series"])[1] for series in case["input_series"]}  # type: ignore[index]
        assert instances == {"a", "b"}
        (sample,) = (sample for test in case["promql_expr_test"] for sample in test["exp_samples"])
        assert 'instance="a:9464"' in sample["labels"]
