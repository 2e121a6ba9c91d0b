"""The checks of `envd doctor` for QEMU, libvirt and KVM."""

import asyncio
import importlib.metadata
import re
import socket
import tempfile
from pathlib import Path

from envd.base.checks import HostCheck, Status, check_tool, fail, install_fix, ok, warn
from envd.base.config import Config, HypervisorConfig
from envd.base.errors import EnvdError
from envd.hypervisor.backends import backend_of, open_hypervisor
from envd.hypervisor.qemu.accelerator import probe_kvm
from envd.hypervisor.qemu.host import NAME_FIX, slow_name

#: The probe takes about 0.1 s if KVM works.
_KVM_PROBE_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 60.0
#: The oldest release that this project was tested with.
_QEMU_MIN = (7, 2)


def check_qemu() -> HostCheck:
    """Check that QEMU is on PATH, runs, and is not too old."""
    name, purpose = "qemu-system-x86_64", "it runs the machines"
    return check_qemu_version(check_tool(name, package="qemu-system-x86", purpose=purpose))


def check_qemu_img() -> HostCheck:
    """Check that the program that creates the machines' disks runs."""
    purpose = "it creates the machines' disks"
    return check_tool("qemu-img", package="qemu-utils", purpose=purpose)


def check_qemu_version(found: HostCheck) -> HostCheck:
    """Check QEMU's version, given the check that it runs."""
    match = re.search(r"\b(\d+)\.(\d+)", found.detail) if found.status is Status.OK else None
    if match is None or (int(match[1]), int(match[2])) >= _QEMU_MIN:
        return found
    minimum = ".".join(map(str, _QEMU_MIN))
    return warn(found.name, f"{found.detail} is older than {minimum}", fix=f"use QEMU {minimum} or newer")


async def check_kvm(config: Config) -> HostCheck:
    """Run guest code with KVM: the device file alone does not prove that KVM works."""
    usable, detail = await probe_kvm(timeout_s=_KVM_PROBE_TIMEOUT_S)
    if usable:
        return ok("kvm", detail)
    required = config.hypervisor.accelerator == "kvm"
    joins_group = "group kvm" in detail
    return HostCheck(
        name="kvm",
        status=Status.FAIL if required else Status.WARN,
        detail=f"{detail}; machines run under TCG, which is slow",
        fix="sudo usermod -aG kvm $USER, and log in again; where /dev/kvm is not of that group:"
        " sudo chgrp kvm /dev/kvm; sudo chmod 660 /dev/kvm"
        if joins_group
        else "serve containers at native speed (--hypervisor oci:), or use a host with working virtualisation",
    )


async def check_libvirt(config: Config) -> HostCheck:
    """Open the hypervisor as the daemon does, but in a temporary state directory."""
    binding = f"libvirt-python {importlib.metadata.version('libvirt-python')}"
    if not backend_of(config.hypervisor.uri).capabilities.runs_guests:
        return ok("libvirt", f"{binding}; not used by the fake hypervisor")
    with tempfile.TemporaryDirectory(prefix="envd-doctor-") as scratch:
        uri = config.hypervisor.uri
        hypervisor_config = HypervisorConfig(uri=backend_of(uri).private_uri(uri), accelerator="tcg")
        scratch_config = config.model_copy(update={"state_dir": Path(scratch), "hypervisor": hypervisor_config})
        try:
            hypervisor = await asyncio.wait_for(open_hypervisor(scratch_config), _OPEN_TIMEOUT_S)
            # The rest names the scratch directory and the accelerator, which the daemon does not use.
            library = hypervisor.description.partition(" at ")[0]
            await hypervisor.close()
        except (EnvdError, TimeoutError) as error:
            return fail(
                "libvirt",
                f"{uri or 'the embedded driver'} cannot be opened: {error or 'no response'}",
                fix=f"{install_fix('libvirt-daemon-driver-qemu')}; for qemu:///system, start libvirtd",
            )
    return ok("libvirt", f"{library}, {binding}; {uri or 'the embedded driver'} can be opened")


def check_host_name() -> HostCheck:
    """Check that the lookup of the host's name, which libvirt makes at each start of a machine, is fast."""
    if problem := slow_name():
        return warn("host_name", problem, fix=NAME_FIX)
    return ok("host_name", f"{socket.gethostname()} is looked up fast")
