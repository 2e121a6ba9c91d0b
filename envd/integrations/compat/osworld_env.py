"""The settings of OSWorld's `DesktopEnv`, which two protocols carry: what applies, and what is refused. Pure."""

from envd.base.errors import InvalidRequest
from envd.desktop.observation import A11yFormat, EncodedFrame, ObservationOptions
from envd.hypervisor.machine import GuestOs
from envd.integrations.compat.protocols import Body
from envd.tasks.model import Task

_SYSTEMS = {"ubuntu": GuestOs.LINUX, "linux": GuestOs.LINUX, "windows": GuestOs.WINDOWS}
_MAX_TREE_CHARS = 1_000_000


class EnvSettings(Body):
    """Arguments of `DesktopEnv`. The daemon decides about machines, so those about providers have no effect."""

    action_space: str = "pyautogui"
    screen_size: tuple[int, int] | None = None
    os_type: str = "Ubuntu"
    require_a11y_tree: bool = True
    require_terminal: bool = False
    provider_name: str | None = None
    region: str | None = None
    path_to_vm: str | None = None
    snapshot_name: str | None = None
    cache_dir: str | None = None
    headless: bool = True
    enable_proxy: bool = False
    client_password: str | None = None

    @property
    def view(self) -> ObservationOptions:
        return ObservationOptions(
            a11y_format=A11yFormat.OSWORLD_XML if self.require_a11y_tree else A11yFormat.NONE,
            a11y_max_chars=_MAX_TREE_CHARS,
            include_terminal=self.require_terminal,
        )

    def check(self, task: Task | None = None) -> None:
        """Refuse what cannot be honoured. Raises: InvalidRequest."""
        if self.action_space != "pyautogui":
            raise InvalidRequest("action_space", f"{self.action_space!r} is not supported; use pyautogui")
        if self.enable_proxy:
            raise InvalidRequest("enable_proxy", "is not supported; a pool's allowed_hosts decide what guests reach")
        system = _SYSTEMS.get(self.os_type.lower())
        if system is None:
            raise InvalidRequest("os_type", f"{self.os_type!r} is not supported; use Ubuntu or Windows")
        if task is not None and task.os is not system:
            raise InvalidRequest("os_type", f"{self.os_type!r} is not the system of task {task.task_id}")

    def check_screen(self, frame: EncodedFrame) -> None:
        """Refuse a screen of another size: the client would scale points to it. Raises: InvalidRequest."""
        actual = (frame.screen_width_px, frame.screen_height_px)
        if self.screen_size is not None and self.screen_size != actual:
            wanted = "x".join(map(str, self.screen_size))
            raise InvalidRequest(
                "screen_size",
                f"{wanted} is not the desktop's {actual[0]}x{actual[1]}; set the client's screen_size, or the daemon's"
                f' pools.NAME.screen = "{wanted}"',
            )
