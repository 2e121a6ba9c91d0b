"""The manifests of Kubernetes: rendered by kubectl, and checked against Kubernetes' own schemas."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from envd.base.config import Config

pytestmark = [pytest.mark.container, pytest.mark.long]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())


def render(overlay: str) -> dict[str, dict[str, Any]]:
    """Return the objects of an overlay by kind."""
    command: list[str | Path] = ["kubectl", "kustomize", KUBERNETES / "overlays" / overlay]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


def pod_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the specification of the daemons' pods."""
    (kind,) = {"DaemonSet", "StatefulSet"} & set(objects)
    pod: dict[str, Any] = objects[kind]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_its_schema(overlay: str) -> None:
    objects = render(overlay)
    own = {kind: each for kind, each in objects.items() if not each["apiVersion"].startswith("monitoring.coreos.com")}
    assert pod_of(objects)["containers"]
    assert {"Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"} <= set(own)
    for each in own.values():
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_daemon_accepts_its_settings_and_ends_within_its_grace_period(overlay: str) -> None:
    objects = render(overlay)
    config = Config.model_validate(tomllib.loads(objects["ConfigMap"]["data"]["envd.toml"]))
    pod = pod_of(objects)
    assert config.limits.drain_timeout_s + 60 <= pod["terminationGracePeriodSeconds"]
    (daemon,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in daemon["ports"]}
    assert (config.listen, config.metrics_listen) == (f"0.0.0.0:{ports['grpc']}", f"0.0.0.0:{ports['metrics']}")
    mounts = [Path(mount["mountPath"]) for mount in daemon["volumeMounts"]]
    for path in (config.security.tls_cert, config.security.tls_key, config.security.tokens_file):
        assert path is not None
        assert any(path.is_relative_to(mount) for mount in mounts)


def test_the_daemons_of_a_node_share_its_images_and_templates() -> None:
    objects = render("several")
    config = Config.model_validate(tomllib.loads(objects["ConfigMap"]["data"]["envd.toml"]))
    pod = pod_of(objects)
    shared = [each["name"] for each in pod["volumes"] if "hostPath" in each]
    mounts = {each["mountPath"] for each in pod["containers"][0]["volumeMounts"] if each["name"] in shared}
    assert mounts == {"/var/cache/envd"}, "the daemon's cache, with the account of the node's memory"
    assert config.template_dir.is_relative_to("/var/cache/envd")
    assert objects["StatefulSet"]["spec"]["replicas"] > 1


@pytest.mark.parametrize("overlay", ["kvm", "several"])
def test_no_container_is_privileged_or_gains_privileges(overlay: str) -> None:
    pod = pod_of(render(overlay))
    for container in [*pod["containers"], *pod["initContainers"]]:
        context = container["securityContext"]
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "privileged" not in context
    (daemon,) = pod["containers"]
    assert daemon["resources"]["requests"] == daemon["resources"]["limits"]
    assert daemon["resources"]["limits"]["devices.kubevirt.io/kvm"] == "1"


def test_desktops_in_containers_need_no_right_on_the_node() -> None:
    objects = render("containers")
    config = Config.model_validate(tomllib.loads(objects["ConfigMap"]["data"]["envd.toml"]))
    assert config.hypervisor.uri == "oci:"
    pod = pod_of(objects)
    assert pod["hostUsers"] is False
    assert "nodeSelector" not in pod
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    for container in [*pod["containers"], *pod["initContainers"]]:
        context = container["securityContext"]
        assert context["procMount"] == "Unmasked"
        assert context["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in context
        assert not [name for name in container.get("resources", {}).get("limits", {}) if "/" in name], "no device"
