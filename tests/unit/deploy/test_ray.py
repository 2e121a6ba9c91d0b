"""The examples for hosts in a Ray cluster: what they offer marks them as hosts."""

import configparser
import json
import shlex
from pathlib import Path

import yaml

from cuaenv.client.ray_cluster import capacities_of

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_the_unit_offers_slots_and_no_cpus_and_leaves_the_daemon_to_its_own_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "ray/envd-host.service")
    command = unit["Service"]["ExecStart"]
    # systemd splits and unquotes as a shell does.
    (offered,) = [each for each in shlex.split(command) if each.startswith("--resources=")]
    assert capacities_of(json.loads(offered.removeprefix("--resources="))) == {"desktop": 48}
    assert "--num-cpus=0" in command
    assert (DEPLOY / "systemd" / unit["Unit"]["After"].split()[-1]).exists()


def test_the_kuberay_group_offers_slots_and_has_the_rights_of_the_daemonset() -> None:
    cluster = yaml.safe_load((DEPLOY / "ray/kuberay.yaml").read_text())
    (group,) = cluster["spec"]["workerGroupSpecs"]
    # KubeRay passes the value on through a shell, hence the quotes in quotes.
    offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
    assert capacities_of(offered) == {"desktop": 48}
    assert group["rayStartParams"]["num-cpus"] == "0"
    assert group["replicas"] >= 1
    daemonset = yaml.safe_load((DEPLOY / "kubernetes/base/daemonset.yaml").read_text())
    (ray,) = group["template"]["spec"]["containers"]
    (envd,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert ray["securityContext"] == envd["securityContext"]
    assert ray["volumeMounts"] == envd["volumeMounts"]
