"""The user ids on the host of a container's users: those subordinate to the daemon's user, never root's."""

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from envd.base.errors import ConfigError

#: Users of a container: the range of a Debian system.
ID_COUNT = 65536
#: For root without an entry of its own: ids that no distribution assigns (https://systemd.io/UIDS-GIDS).
_ROOTS_FIRST_ID = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IdMap:
    """User and group ids of containers on the host."""

    root_uid: int
    """Host's id of a container's root."""
    root_gid: int
    first_uid: int
    """Host's id of a container's user 1."""
    first_gid: int
    is_privileged: bool
    """Whether the daemon may write the maps itself; otherwise newuidmap and newgidmap do."""

    @property
    def name(self) -> str:
        """Names files whose owners are mapped so."""
        return f"{self.root_uid}-{self.first_uid}"

    def lines(self, *, groups: bool) -> list[tuple[int, int, int]]:
        """Return the map: (id in the container, id on the host, count)."""
        root, first = (self.root_gid, self.first_gid) if groups else (self.root_uid, self.first_uid)
        return [(0, root, 1), (1, first, ID_COUNT - 1)]


def own_ids() -> IdMap:
    """Return the ids of this process's user. Raises: ConfigError: it has too few subordinate ids."""
    uid, gid = os.geteuid(), os.getegid()
    uids, gids = _subordinate("/etc/subuid", uid), _subordinate("/etc/subgid", uid)
    if uid == 0:
        first = _ROOTS_FIRST_ID if uids is None or gids is None else uids
        return IdMap(
            root_uid=first,
            root_gid=first if gids is None else gids,
            first_uid=first + 1,
            first_gid=(first if gids is None else gids) + 1,
            is_privileged=True,
        )
    if uids is None or gids is None:
        raise ConfigError(
            f"hypervisor oci: user {name_of(uid)} has no {ID_COUNT} subordinate ids; run"
            f" `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name_of(uid)}` as root"
        )
    return IdMap(root_uid=uid, root_gid=gid, first_uid=uids, first_gid=gids, is_privileged=False)


def _subordinate(file: str, uid: int) -> int | None:
    """Return the first id of a user's range in a file of subuid(5); None if it has none that is large enough."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        owner, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        if owner in {str(uid), name_of(uid)} and first.isdigit() and count.isdigit() and int(count) >= ID_COUNT:
            return int(first)
    return None


def name_of(uid: int) -> str:
    """Return a user's name, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
