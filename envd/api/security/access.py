"""Authorization: scopes, the rule of each method, and owners of episodes. Pure except for one context variable.

Fails closed: a method without a rule raises KeyError, and a call that the interceptor did not admit has no caller.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from envd.base.errors import ScopeTooSmall, Unauthenticated

_SCHEME = "bearer"


class Scope(IntEnum):
    """Rights of a token. Each scope includes the lower ones."""

    #: List pools, tasks and episodes, and watch all of them in the console.
    READ = 1
    #: Open episodes, and make any call for them.
    RUN = 2
    #: Any call, for every owner's episodes; import checkpoints.
    ADMIN = 3

    @property
    def word(self) -> str:
        """Its name in token files and on the command line."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call a method, and with how much."""

    scope: Scope | None
    """The minimum scope; None if the method needs no token."""
    max_bytes: int = 256 << 10


#: Maximum size of one message in either direction.
MAX_MESSAGE_BYTES: Final = 64 << 20
#: 64 actions may each type 64 KiB.
_STEP_BYTES = 8 << 20
#: 1000 ids of 256 characters.
_ID_LIST_BYTES = 2 << 20
#: Messages of archives; ours have half of it.
_ARCHIVE_BYTES = 2 << 20
#: The longest service name is 256 bytes.
_HEALTH_BYTES = 256 + 8

#: The rule of each method of `CUAEnv`.
RULES: Final[Mapping[str, Rule]] = {
    "GetServer": Rule(Scope.READ),
    "ListPools": Rule(Scope.READ),
    "WatchPools": Rule(Scope.READ),
    "GetEpisode": Rule(Scope.READ),
    "ListEpisodes": Rule(Scope.READ),
    "GetTask": Rule(Scope.READ),
    "ListTasks": Rule(Scope.READ, _ID_LIST_BYTES),
    "Reset": Rule(Scope.RUN),
    "Step": Rule(Scope.RUN, _STEP_BYTES),
    "StreamSteps": Rule(Scope.RUN, _STEP_BYTES),
    "Observe": Rule(Scope.RUN),
    "StreamFrames": Rule(Scope.RUN),
    "Evaluate": Rule(Scope.RUN),
    "Fork": Rule(Scope.RUN),
    "CreateCheckpoint": Rule(Scope.RUN),
    "Rollback": Rule(Scope.RUN),
    "GetCheckpoint": Rule(Scope.READ),
    "ListCheckpoints": Rule(Scope.READ),
    "DeleteCheckpoint": Rule(Scope.RUN),
    "ExportCheckpoint": Rule(Scope.RUN),
    # QEMU reads the state of a machine from it, which it does not harden against hostile writers.
    "ImportCheckpoint": Rule(Scope.ADMIN, _ARCHIVE_BYTES),
    "Close": Rule(Scope.RUN),
    "KeepAlive": Rule(Scope.RUN, _ID_LIST_BYTES),
    "ReadGuestFile": Rule(Scope.RUN),
    "WriteGuestFile": Rule(Scope.RUN, MAX_MESSAGE_BYTES),
    "RunGuestCommand": Rule(Scope.RUN, MAX_MESSAGE_BYTES),
    "ForwardGuestPort": Rule(Scope.RUN),
}

#: The rules of other services' methods. Health needs no token: load balancers have none.
_OTHER_RULES: Final[Mapping[str, Rule]] = {
    "Health/Check": Rule(None, _HEALTH_BYTES),
    "Health/List": Rule(None, _HEALTH_BYTES),
    "Health/Watch": Rule(None, _HEALTH_BYTES),
    # Its responses repeat the request.
    "ServerReflection/ServerReflectionInfo": Rule(Scope.READ, 4096),
}


def rule_of(method: str) -> Rule:
    """Return the rule of a method. Raises: KeyError: it has none, so it must not be served."""
    return RULES[method] if method in RULES else _OTHER_RULES[method]


#: Methods that only keep or release the caller's resources: exempt from the configured rate limit. For another caller's
#: episode they succeed without effect, as for an unknown one.
ALWAYS_SERVED: Final = frozenset({"KeepAlive", "Close"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The authenticated caller of a call."""

    name: str
    """The token's name; empty if the daemon uses no tokens."""
    scope: Scope
    max_machines: int | None = None
    """Maximum machines that its episodes may hold together; None for no limit."""

    def require(self, method: str) -> None:
        """Check that the scope covers the method. Raises: ScopeTooSmall."""
        needed = rule_of(method).scope
        if needed is not None and self.scope < needed:
            raise ScopeTooSmall(
                f"token {self.name!r}: scope {self.scope.word} is too small, {method} needs {needed.word};"
                " ask the operator"
            )

    def may_use(self, owner: str | None) -> bool:
        """Return whether an episode of `owner` may be used; the owner of an unknown episode is None.

        Unknown episodes are treated like those of other owners, before any other check of the request: a difference
        would reveal which ids exist.
        """
        return self.scope is Scope.ADMIN or owner == self.name

    def may_list(self, owner: str | None) -> bool:
        """Return whether an episode of `owner` appears in listings; the owner of an unknown episode is None."""
        return owner is not None and (self.scope is not Scope.RUN or owner == self.name)

    def may_call(self, method: str, owner: str | None) -> bool:
        """Return whether the caller may call a method for an episode of `owner`."""
        return self.may_list(owner) if rule_of(method).scope is Scope.READ else self.may_use(owner)


#: Every caller of a daemon without tokens: processes on its host, or holders of client certificates.
TRUSTED: Final = Caller(name="", scope=Scope.ADMIN)

# No default: reading it outside an admitted call is a bug.
_caller: ContextVar[Caller] = ContextVar("envd_caller")


def current_caller() -> Caller:
    return _caller.get()


def set_current_caller(caller: Caller) -> None:
    """Set the caller of the call that this task serves; grpc runs each call in its own task."""
    _caller.set(caller)


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the token of a call. Raises: Unauthenticated: there is none, or more than one."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        raise Unauthenticated(
            f"the call has {len(values) or 'no'} authorization headers; send one, `authorization: Bearer TOKEN`"
        )
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != _SCHEME or not token.strip():
        raise Unauthenticated("the call's authorization header is malformed; send `authorization: Bearer TOKEN`")
    return token.strip()
