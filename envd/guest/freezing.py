"""Take a Linux guest away from its agent: freeze the processes of its session, and run commands apart from it.

Root's agent runs the scripts. They use programs of the system only, and need neither the session nor guestd.
"""

from collections.abc import Sequence

from envd.base.errors import GuestError
from envd.guest.agent import GuestAgent

#: A fork bomb on a slow host: the kernel stops each process by itself.
_TIMEOUT_S = 60.0
#: Shorter: after a failed freeze, the evaluation must end by that failure and not by its own limit.
_THAW_TIMEOUT_S = 30.0
_MESSAGE_BYTES = 500
#: The user of the session; the first ordinary user of Debian and Ubuntu.
_USER_ID = 1000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Control groups stop all processes of a group at once, and a process cannot leave its group. Signals are for guests
# without version 2 of them: a process can have a timer send itself SIGCONT. Programs that the host started as the user
# are in the groups of the services that did, whose own processes are root's and continue in another group.
# What the shell can do itself, it does: each program costs an emulated guest 0.1 s. But a group may have thousands of
# processes, which the shell would read a byte at a time.
_GROUPS = f"""
PATH={_PATH}
cd /sys/fs/cgroup || exit
services=
for service in system.slice/qemu-guest-agent.service system.slice/envd-*.service; do
[ ! -d "$service" ] || services="$services $service"
done
groups=$services
[ ! -d user.slice ] || groups="user.slice $services"
"""
_FREEZE = f"""{_GROUPS}
if [ ! -e cgroup.controllers ]; then
setpriv --reuid={_USER_ID} --clear-groups sh -c 'kill -STOP -1'
exit 0
fi
awake=system.slice/envd-awake
[ -d $awake ] || mkdir $awake
echo $$ >$awake/cgroup.procs || exit
processes=/dev/null
for service in $services; do processes="$processes $service/cgroup.procs"; done
for status in $(sed 's|.*|/proc/&/status|' $processes | xargs -r grep -ls '^Uid:.0.'); do
pid=${{status#/proc/}}
echo ${{pid%/status}} >$awake/cgroup.procs
done 2>/dev/null
for group in $groups; do
echo 1 >$group/cgroup.freeze || exit
done
is_frozen() {{
while read -r line; do
[ "$line" != 'frozen 1' ] || return 0
done <$1/cgroup.events
return 1
}}
for group in $groups; do
until is_frozen $group; do sleep 0.02; done
done
"""
_THAW = f"""{_GROUPS}
if [ ! -e cgroup.controllers ]; then
setpriv --reuid={_USER_ID} --clear-groups sh -c 'kill -CONT -1'
exit 0
fi
for group in $groups; do
echo 0 >$group/cgroup.freeze
done
"""
# A new environment and a fixed PATH: the user's own settings decide nothing but what the program itself reads.
_AS_USER = f"""
PATH={_PATH}
IFS=: read -r name _ _ group _ home _ <<ENTRY
$(getent passwd {_USER_ID})
ENTRY
cd "$home" 2>/dev/null || cd /
exec setpriv --reuid={_USER_ID} --regid="$group" --init-groups \
env -i HOME="$home" USER="$name" LOGNAME="$name" SHELL=/bin/bash PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 "$@"
"""


async def freeze(agent: GuestAgent) -> None:
    """Stop all processes of the session until `thaw`. Has no effect in Windows itself, which has no such means.

    Raises:
        GuestError, GuestUnresponsive: They still run, or may.
    """
    await _run(agent, "freeze-session", _FREEZE, timeout_s=_TIMEOUT_S)


async def thaw(agent: GuestAgent) -> None:
    """Let the session continue. Raises: GuestError, GuestUnresponsive."""
    await _run(agent, "thaw-session", _THAW, timeout_s=_THAW_TIMEOUT_S)


def as_user(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command for root's agent that runs a command with the rights of the session's user, outside of it."""
    return ("sh", "-c", _AS_USER, "run-as-user", *argv)


async def _run(agent: GuestAgent, name: str, script: str, *, timeout_s: float) -> None:
    result = await agent.run(["/bin/sh", "-c", script, name], timeout_s=timeout_s)
    if result.exit_code:
        message = result.stderr[:_MESSAGE_BYTES].decode("utf-8", "replace").strip()
        raise GuestError(f"{name}: exit code {result.exit_code}: {message or 'no message'}")
