"""`trainer hosts`: start, show and drain the KVM hosts of a Ray cluster."""

import time
from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.table import Table

from cuaenv.cli.terminal import EXIT_FAILED, Json, emit_json, err, out
from cuaenv.client.ray_cluster import NodeStatus, status
from cuaenv.client.targets import parse_targets
from trainer.cli.output import UsageError, reports_errors

app = typer.Typer(no_args_is_help=True, help="Start, show and drain the KVM hosts of a Ray cluster.")

Cluster = Annotated[
    str, typer.Option("--cluster", metavar="ray://auto|ray://HOST:PORT", help="The cluster that the hosts have joined.")
]
_POLL_S = 1.0
_UP = {"up", "draining", "drained"}


@app.command("up", context_settings={"ignore_unknown_options": True})
@reports_errors()
def up_command(
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Starts the daemon on each host: envd serve ... ; {node} and {ip} are filled in."),
    ] = None,
    cluster: Cluster = "ray://auto",
    endpoint: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Of each daemon, such as {ip}:50051; default: as the daemon prints."),
    ] = "",
    ca_file: Annotated[str, typer.Option(help="File on each host with the daemon's certificate authority.")] = "",
    directory: Annotated[str, typer.Option(help="Directory on each host for the daemon's pid, output and log.")] = "",
    node: Annotated[str, typer.Option(help="Only end the drain of this host.")] = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, max=86400, help="Seconds to wait until all hosts are up.")
    ] = 900.0,
    as_json: Json = False,
) -> None:
    """Start the daemons of all hosts, also of those that join later, and wait until they are up.

    Without a command, daemons that something else runs are adopted at --endpoint. Ctrl-C stops waiting, not the hosts.
    """
    target = _target(cluster)
    from trainer.hosts.actor import HostSettings  # noqa: PLC0415 -- imports Ray
    from trainer.hosts.supervisor import resume, up  # noqa: PLC0415

    if node:
        resume(target, node)
    elif not command and not endpoint:
        raise UsageError(
            "no command and no --endpoint; give `-- envd serve ...`, or --endpoint {ip}:50051 to adopt daemons"
        )
    else:
        chosen = {"directory": directory} if directory else {}
        up(target, HostSettings(command=tuple(command or ()), endpoint=endpoint, ca_file=ca_file, **chosen))
    current = _wait(target, node=node, wanted=_UP, timeout_s=timeout_s)
    _show(current, as_json=as_json)
    if not current or any(each.report.state not in _UP for each in _chosen(current, node)):
        raise typer.Exit(EXIT_FAILED)


@app.command("status")
@reports_errors()
def status_command(*, cluster: Cluster = "ray://auto", as_json: Json = False) -> None:
    """Show each host with its machines."""
    _show(status(_target(cluster)), as_json=as_json)


@app.command("drain")
@reports_errors()
def drain_command(
    *,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name or id of the node.")],
    cluster: Cluster = "ray://auto",
    restart: Annotated[
        bool, typer.Option("--restart", help="Start the daemon again at the end, for an upgrade.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, max=86400, help="Seconds to wait for the episodes to end.")
    ] = 3600.0,
    as_json: Json = False,
) -> None:
    """Let no new episodes begin on a host, and stop its daemon when the last one has ended.

    Ctrl-C stops waiting, not the drain; `trainer hosts up --node NODE` ends it.
    """
    target = _target(cluster)
    from trainer.hosts.supervisor import drain, resume  # noqa: PLC0415 -- imports Ray

    drain(target, node)
    current = _wait(target, node=node, wanted={"drained"}, timeout_s=timeout_s)
    is_drained = all(each.report.state == "drained" for each in _chosen(current, node))
    if is_drained and restart:
        resume(target, node)
        current = _wait(target, node=node, wanted={"up"}, timeout_s=timeout_s)
        is_drained = all(each.report.state == "up" for each in _chosen(current, node))
    _show(current, as_json=as_json)
    if not is_drained:
        raise typer.Exit(EXIT_FAILED)


def _target(cluster: str) -> str:
    try:
        (target,) = parse_targets(cluster)
    except ValueError as error:
        raise UsageError(f"--cluster {cluster}: {error}") from error
    if not target.startswith("ray://"):
        raise UsageError(f"--cluster {cluster}: not a Ray cluster; give ray://auto or ray://HOST:PORT")
    if find_spec("ray") is None:
        raise UsageError("Ray is not installed; install envd-trainer[ray], in the version of the cluster")
    return target


def _chosen(current: list[NodeStatus], node: str) -> list[NodeStatus]:
    return [each for each in current if node in {"", each.node_id, each.report.node}]


def _wait(target: str, *, node: str, wanted: set[str], timeout_s: float) -> list[NodeStatus]:
    """Wait until the chosen hosts are in a wanted state, or until the timeout; print changes to standard error."""
    until_s = time.monotonic() + timeout_s
    printed: dict[str, str] = {}
    while True:
        current = status(target)
        chosen = _chosen(current, node)
        for each in chosen:
            line = f"{each.report.node}: {each.report.state} {each.report.problem}".strip()
            if printed.get(each.node_id) != line:
                printed[each.node_id] = line
                err.print(line, markup=False, soft_wrap=True)
        is_done = chosen and all(each.report.state in wanted for each in chosen)
        if is_done or time.monotonic() > until_s:
            return current
        time.sleep(_POLL_S)


def _show(current: list[NodeStatus], *, as_json: bool) -> None:
    if as_json:
        nodes = [{**asdict(each), "report": {**asdict(each.report), "ca": ""}} for each in current]
        emit_json({"nodes": nodes})
        return
    table = Table("node", "state", "pool", "capacity", "leased", "queued", "endpoint", box=None, pad_edge=False)
    for each in sorted(current, key=lambda each: each.report.node):
        report = each.report
        for index, (pool, capacity) in enumerate(sorted(each.capacity.items())):
            shown = (
                [str(report.leased_count), str(report.waiting_count), report.endpoint] if index == 0 else ["", "", ""]
            )
            names = [report.node, report.state] if index == 0 else ["", ""]
            table.add_row(*names, pool, str(capacity), *shown)
    out.print(table)
    for each in current:
        if each.report.problem:
            out.print(f"{each.report.node}: {each.report.problem}", markup=False, soft_wrap=True)
