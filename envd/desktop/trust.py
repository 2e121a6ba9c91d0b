"""Let the programs of a Linux guest accept the certificates of one more authority."""

from envd.base.errors import GuestError
from envd.desktop.agent import GuestAgent

_TIMEOUT_S = 300.0

#: The system's store, for programs that use OpenSSL or GnuTLS; policies for browsers, which have stores of their own.
#: What update-ca-certificates does, for one certificate: in a busy emulated guest it needs minutes for all 140.
#: Chromium reads every file of its directory, Firefox one file, which an image may have already.
_INSTALL = r"""
import json, pathlib, subprocess, sys
pem = sys.stdin.read()
certificate = pathlib.Path("/usr/local/share/ca-certificates/envd-web.crt")
certificate.parent.mkdir(parents=True, exist_ok=True)
certificate.write_text(pem)
store = pathlib.Path("/etc/ssl/certs")
with open(store / "ca-certificates.crt", "a") as bundle:
    bundle.write(pem)
command = ["openssl", "x509", "-noout", "-subject_hash", "-in", certificate]
name = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
number = next(number for number in range(100) if not (store / f"{name}.{number}").exists())
(store / f"{name}.{number}").symlink_to(certificate)
encoded = "".join(line for line in pem.splitlines() if not line.startswith("-"))
for browser in ("chromium", "opt/chrome"):
    policy = pathlib.Path("/etc", browser, "policies/managed/envd-web.json")
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text(json.dumps({"CACertificates": [encoded]}))
policy = pathlib.Path("/etc/firefox/policies/policies.json")
policy.parent.mkdir(parents=True, exist_ok=True)
content = json.loads(policy.read_text()) if policy.exists() else {}
content.setdefault("policies", {}).setdefault("Certificates", {}).setdefault("Install", []).append(str(certificate))
policy.write_text(json.dumps(content))
"""


async def trust(agent: GuestAgent, authority: str) -> None:
    """Install an authority's certificate, PEM, for the system and its browsers. Programs that run may not see it.

    Raises:
        GuestError: The guest has no Python, OpenSSL or store of certificates.
    """
    result = await agent.run(["/usr/bin/python3", "-I", "-c", _INSTALL], timeout_s=_TIMEOUT_S, stdin=authority.encode())
    if result.exit_code != 0:
        problem = result.stderr.decode(errors="replace").strip()[-500:]
        raise GuestError(f"the authority of web recordings cannot be installed in the guest: {problem}")
