"""Authorization: scopes, the methods that each allows, and owners of episodes. Pure except for one context variable.

Fails closed: a method without a scope raises KeyError, and a call that the interceptor did not admit has no caller.
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
    #: Any call, for every owner's episodes.
    ADMIN = 3

    @property
    def word(self) -> str:
        """Its name in token files and on the command line."""
        return self.name.lower()


#: The minimum scope of each method of `CUAEnv`.
SCOPES: Final[Mapping[str, Scope]] = {
    "ListPools": Scope.READ,
    "WatchPools": Scope.READ,
    "ListEpisodes": Scope.READ,
    "ListTasks": Scope.READ,
    "Reset": Scope.RUN,
    "Step": Scope.RUN,
    "StreamSteps": Scope.RUN,
    "Observe": Scope.RUN,
    "StreamFrames": Scope.RUN,
    "Evaluate": Scope.RUN,
    "Fork": Scope.RUN,
    "Close": Scope.RUN,
    "KeepAlive": Scope.RUN,
    "ReadGuestFile": Scope.RUN,
    "WriteGuestFile": Scope.RUN,
    "RunGuestCommand": Scope.RUN,
}

#: The minimum scope of other services' methods. Health needs none: load balancers have no token.
_OTHER_SCOPES: Final[Mapping[str, Scope]] = {"ServerReflection/ServerReflectionInfo": Scope.READ}

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
        needed = SCOPES[method] if method in SCOPES else _OTHER_SCOPES[method]
        if self.scope < needed:
            raise ScopeTooSmall(
                f"token {self.name!r}: has scope {self.scope.word}, and {method} needs {needed.word}; ask the operator"
            )

    def may_use(self, owner: str | None) -> bool:
        """Return whether an episode of `owner` may be used; the owner of an unknown episode is None.

        Unknown episodes are treated like those of other owners, before any other check of the request: a difference
        would reveal which ids exist.
        """
        return self.scope is Scope.ADMIN or owner == self.name

    def may_list(self, owner: str) -> bool:
        """Return whether an episode of `owner` appears in listings."""
        return self.scope is not Scope.RUN or owner == self.name


#: Every caller of a daemon without tokens: processes on its host, or holders of client certificates.
TRUSTED: Final = Caller(name="", scope=Scope.ADMIN)

# No default: reading it outside an admitted call is a bug.
_caller: ContextVar[Caller] = ContextVar("envd_caller")


def current_caller() -> Caller:
    """Return the caller of the call that this task serves."""
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
