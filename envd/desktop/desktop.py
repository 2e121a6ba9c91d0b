"""One guest's desktop: screen, input, agent and guestd of one machine behind one object.

Owns the connections into the guest, not the machine: closing a desktop leaves the machine running.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

from cuaenv.actions import Action, ToolAction
from cuaenv.results import CommandResult, UnrecordedRequest
from envd.base.channels import GuestChannels
from envd.base.config import SettlePolicy
from envd.base.errors import GuestError, GuestUnresponsive, InvalidRequest, MachineLost
from envd.base.telemetry import traces
from envd.desktop import toolbox
from envd.desktop.a11y import outline, parse_tree, with_marks
from envd.desktop.acting import Actor
from envd.desktop.agent import GuestAgent, renew_identity
from envd.desktop.display.change import screen_change
from envd.desktop.display.encoder import FrameEncoder
from envd.desktop.display.frames import Frame, Mark, marks_of
from envd.desktop.display.screen import Screen
from envd.desktop.display_connection import ConnectionState, DesktopView, DisplayConnection
from envd.desktop.freezing import freeze, thaw
from envd.desktop.gateway import Exit, GuestGateway
from envd.desktop.input.plan import Input
from envd.desktop.observation import (
    A11yElements,
    A11yFormat,
    ActionOutcome,
    EncodedFrame,
    Observation,
    ObservationOptions,
    SettleResult,
)
from envd.desktop.session import GuestPauses, GuestSession, wait_idle, wait_ready
from envd.desktop.settler import Settler
from envd.desktop.tunnel import open_port

T = TypeVar("T")
P = ParamSpec("P")


def while_alive(
    method: Callable[Concatenate["Desktop", P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Desktop", P], Coroutine[Any, Any, T]]:
    """Make a method of `Desktop` raise `MachineLost` as soon as the machine is lost, whatever it waits for."""

    @wraps(method)
    async def guarded(self: "Desktop", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._alive(lambda: method(self, *args, **kwargs))

    return guarded


class Desktop:
    """The desktop of one running guest: observe it and act on it.

    Every method raises `MachineLost` as soon as the machine is lost, whatever it waits for. The display is connected
    when first needed, and again each time its connection drops while the machine lives. Methods raise
    `GuestUnresponsive` if the guest does not answer in time, and `GuestError` if it cannot do what is asked.
    One caller acts; others may observe concurrently.
    """

    def __init__(
        self,
        channels: GuestChannels,
        *,
        view: DesktopView | None = None,
        web: Exit | None = None,
        screen_px: tuple[int, int] | None = None,
        has_powershell: bool = False,
        can_freeze: bool = True,
        pauses: GuestPauses | None = None,
    ) -> None:
        """Prepare to connect to a machine.

        Args:
            view: What it shows, if it was forked and has not run since. The desktop is then asleep: requests for its
                screen are answered from the view until `wake`.
            web: Serves the web requests of its guest after `wake`; None for no network.
            screen_px: The (width, height) that it should have. Twice as much is accepted on each side, and at least
                1280x1024; None for any size up to 16 Mpx.
            has_powershell: Whether the guest's agent runs the scripts of `envd.guests.powershell`.
            can_freeze: Whether the guest's kernel is Linux, which can stop all processes of the session.
        """
        self._pauses = pauses or GuestPauses()
        self._channels = channels
        self._view = view
        self._web = web
        self._gateway: GuestGateway | None = None
        self._agent = GuestAgent(channels)
        self._can_freeze = can_freeze
        self._session = GuestSession(channels, self._agent, view=view, has_powershell=has_powershell)
        self._screen = Screen()
        self._encoder = FrameEncoder()
        self._input = Input(held=view.inputs if view else None, key_pause_s=self._pauses.key_pause_s)
        self._display = DisplayConnection(channels, self._screen, self._input, screen_px=screen_px)
        self._settler = Settler(channels, display=self._display, screen=self._screen)
        self._actor = Actor(
            channels.machine_id,
            display=self._display,
            screen=self._screen,
            held=self._input,
            session=self._session,
            settler=self._settler,
            pauses=self._pauses,
        )
        self._woken = asyncio.Event()
        self._was_idle = True
        self._encoding: asyncio.Task[None] | None = None
        self._loss_task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._scopes: set[asyncio.Timeout] = set()
        self._response_s = time.monotonic()
        self.before_act: Callable[[Action], Awaitable[None]] | None = None
        """Awaited before each action; for demonstrations that note what is under the pointer. It must not fail."""

    # State

    @property
    def is_asleep(self) -> bool:
        """Whether its machine was forked and has not run since."""
        return self._view is not None

    @property
    def connection_state(self) -> ConnectionState:
        """State that a new connection to this desktop cannot discover by itself."""
        held = self._view.inputs if self._view else self._input.held
        return ConnectionState(
            pointer=held.pointer,
            is_holding=bool(held.buttons or held.keys),
            guestd_types=self._session.guestd_types,
            home=self._session.home,
        )

    @property
    def screen_size(self) -> tuple[int, int]:
        """Current (width, height) of the screen in pixels; (0, 0) before the display is first connected."""
        return self._view.size_px if self._view else self._screen.size

    @property
    def idle_since_response_s(self) -> float:
        """Seconds since the guest last proved to be alive; 0 while the desktop is asleep."""
        return 0.0 if self._view is not None else time.monotonic() - self._response_s

    @property
    def changed(self) -> asyncio.Event:
        """Set when there may be something new to see: pixels or the pointer, or, while asleep, when it wakes.

        Take it before observing, and wait on it after.
        """
        return self._woken if self._view is not None else self._screen.changed

    # Lifecycle

    @while_alive
    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return once the agent answers, the session is up, the screen has settled and the guest is idle.

        Raises:
            GuestUnresponsive: One of the first three did not happen within `timeout_s`.
        """
        await wait_ready(
            self._channels,
            agent=self._agent,
            session=self._session,
            settler=self._settler,
            pauses=self._pauses,
            timeout_s=timeout_s,
        )

    @while_alive
    async def wake(self, *, windows: bool = False) -> None:
        """Give a fork its own clock, machine id and random numbers. Does nothing if that was done already.

        Its machine runs from just before this call, and the guest gets no other request before it. On failure the
        desktop is still asleep and its machine must not be used.
        """
        if self._view is None:
            return
        # Concurrently: the first whole frame takes about 0.1 s, and the guest longer.
        display = asyncio.create_task(self._display.client(), name=f"wake:{self._channels.machine_id}")
        try:
            await renew_identity(self._agent, machine_id=self._channels.machine_id, windows=windows)
            await self._open_gateway()
            await display
        finally:
            display.cancel()
            await asyncio.gather(display, return_exceptions=True)
        self._encoder, self._view = self._view.encoder.branch(), None
        self._woken.set()
        self._settler.note_woken()
        self._response_s = time.monotonic()

    @while_alive
    async def check_alive(self, *, timeout_s: float) -> None:
        """Ping the guest's agent. A display keeps showing its last frame after the guest has died."""
        await self._agent.ping(timeout_s=timeout_s)
        self._response_s = time.monotonic()

    @while_alive
    async def wait_idle(self, *, max_wait_s: float) -> None:
        """Wait until the guest uses next to no CPU time: every fork of it would repeat the work it is doing now.

        A program that has opened its window but not drawn it yet uses CPU time although the screen is quiet.
        """
        await wait_idle(self._channels, reading_s=self._pauses.idle_reading_s, max_wait_s=max_wait_s)

    async def close(self) -> None:
        """Close the connections. Idempotent; never fails."""
        self._is_closed = True
        owned = [task for task in (self._loss_task, self._encoding) if task is not None]
        for task in owned:
            task.cancel()
        await asyncio.gather(self._display.close(), *owned, return_exceptions=True)
        # The exception of a cancelled task refers to this object: in a cycle with it, the pixels would stay in memory
        # until a full garbage collection.
        self._loss_task = self._encoding = None
        if self._gateway is not None:
            await self._gateway.close()
        await self._session.close()

    # Acting

    @while_alive
    async def act(self, action: Action) -> ActionOutcome:
        """Perform one action. `Wait` sleeps; `Done` and `Fail` do nothing here; tools have `use_tool`.

        Raises:
            GuestError: The display connection dropped during input, or the machine has no tablet.
        """
        if self.before_act is not None:
            await self.before_act(action)
        return await self._actor.act(action)

    @while_alive
    async def use_tool(self, action: ToolAction) -> ActionOutcome:
        """Use a tool in the guest, whether it is allowed or not. A tool that fails is reported in the outcome."""
        return await self._actor.use_tool(action)

    @while_alive
    async def settle(self, policy: SettlePolicy, *, upcoming: ObservationOptions | None = None) -> SettleResult:
        """Wait until the screen is quiet. Frames taken afterwards are newer than the last input, settled or not.

        Args:
            upcoming: Options of the next `observe`; its frame is encoded ahead once the screen is likely settled.
        """
        if self._view is not None:  # nothing has moved since the view was taken
            return SettleResult(settled=True, settle_ms=0.0, change_count=0)
        result = await self._settler.settle(
            policy, was_idle=self._was_idle, likely_settled=lambda: self._encode_ahead(upcoming)
        )
        self._was_idle = result.is_idle
        return result

    def _encode_ahead(self, options: ObservationOptions | None) -> None:
        """Start to encode the current screen; a later request for the same frame gets the result, or joins."""
        # Marks are not known yet.
        if options is None or options.draw_marks or not self._screen.is_complete:
            return
        if self._encoding is not None and not self._encoding.done():
            return

        async def encode() -> None:
            with suppress(InvalidRequest):  # raised again to the caller of `observe`
                await self.encode(self._display.with_pointer(await self._screen.newest_frame()), options)

        self._encoding = asyncio.create_task(encode(), name=f"encode:{self._channels.machine_id}")

    # Observing

    async def frame(self, *, refresh: bool = False) -> Frame:
        """Return the newest frame; with `refresh`, make the display send what it has first. Never wakes the machine."""
        if self._view is not None and not refresh:
            return self._view.frame
        return await self._alive(lambda: self._display.newest_frame(refresh=refresh))

    def frame_nowait(self) -> Frame | None:
        """Return what the display has shown so far; None while it is not connected."""
        if self._view is not None:
            return self._view.frame
        return self._display.with_pointer(self._screen.frame()) if self._screen.is_complete else None

    @while_alive
    async def view(self) -> DesktopView:
        """Return what the desktop shows and holds. Its machine must be paused, or the view is of no defined moment."""
        if self._view is not None:
            return self._view
        frame = await self._display.newest_frame(refresh=True)
        return DesktopView(
            frame=frame,
            caps_lock=self._screen.caps_lock,
            inputs=self._input.held,
            guestd_types=self._session.guestd_types,
            home=self._session.home,
            encoder=self._encoder.branch(),
        )

    @while_alive
    async def observe(
        self, options: ObservationOptions, *, refresh: bool = False, since: Frame | None = None
    ) -> Observation:
        """Return the newest frame, encoded off the event loop, with accessibility tree and terminal if requested.

        Args:
            refresh: Make the display send what it has first.
            since: An earlier frame; report what has changed since.

        Raises:
            InvalidRequest: The options do not fit this screen.
            GuestError: The guest cannot report its tree or terminal, or has no guestd.
        """
        timings_ms: dict[str, float] = {}
        if self._view is not None and not (refresh or options.asks_guest):
            frame = self._view.frame
        else:
            with _timed(timings_ms, "capture"):
                frame = await self._display.newest_frame(refresh=refresh)
        tree = elements = None
        if options.asks_for_tree:
            with _timed(timings_ms, "a11y_tree"):
                tree, elements = await self._read_tree(options)
        with _timed(timings_ms, "encode"):
            encoded = await self.encode(frame, options, marks=marks_of(elements))
        change = terminal = None
        if since is not None:
            with _timed(timings_ms, "screen_change"):
                change = await asyncio.to_thread(screen_change, since, frame, grey=options.include_grey_difference)
        if options.include_terminal:
            with _timed(timings_ms, "terminal"):
                terminal = await self._session.guestd("read the terminal").terminal()
        return Observation(
            frame=encoded,
            screen_change=change,
            a11y_tree=tree,
            a11y_elements=elements,
            terminal=terminal,
            timings_ms=timings_ms,
        )

    async def encode(self, frame: Frame, options: ObservationOptions, *, marks: tuple[Mark, ...] = ()) -> EncodedFrame:
        """Encode a frame of this desktop, with marks drawn over it. Equal requests share one result.

        Raises:
            InvalidRequest: The options do not fit this screen.
        """
        if self._view is not None and frame is self._view.frame:
            return await self._view.encode(options)
        return await self._encoder.encode(frame, options, marks=marks)

    async def _read_tree(self, options: ObservationOptions) -> tuple[str | None, A11yElements | None]:
        """Return the tree as text and as elements, each if requested."""
        xml = await self._session.accessibility(showing=options.a11y_format is not A11yFormat.OSWORLD_XML)
        if options.a11y_format is A11yFormat.OSWORLD_XML and not options.includes_elements:
            return xml, None
        try:
            # A large tree takes 0.1 s.
            elements = await asyncio.to_thread(parse_tree, xml, screen_px=self._screen.size)
        except GuestError as error:
            raise GuestError(
                f"machine {self._channels.machine_id} returned an invalid accessibility tree: {error}"
            ) from error
        if options.draw_marks:
            elements = with_marks(elements)
        tree = None
        if options.a11y_format is A11yFormat.OSWORLD_XML:
            tree = xml
        elif options.a11y_format is A11yFormat.COMPACT:
            tree = outline(elements, max_chars=options.a11y_max_chars)
        return tree, elements if options.includes_elements else None

    # Commands and files

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Stop all processes of the session during the block: what the guest's files say then stays so.

        Commands of root run, and `envd.desktop.freezing.as_user` runs others; whatever asks the session waits. Windows
        itself cannot do it: there the session continues.
        """
        if not self._can_freeze:
            yield
            return
        try:
            await self._alive(lambda: freeze(self._agent))
            yield
        finally:
            with suppress(GuestError, GuestUnresponsive, MachineLost):
                await self._alive(lambda: thaw(self._agent))

    @while_alive
    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        as_root: bool = False,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command to its end: in the user's session through guestd, or as root through the agent."""
        if not as_root:
            guestd = self._session.guestd("run a command in the session")
            return await guestd.execute(argv, timeout_s=timeout_s, stdin=stdin, env=env)
        # `env` runs it: an environment passed to the agent would replace the agent's own, which holds PATH.
        prefix = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
        return await self._agent.run([*prefix, *argv], timeout_s=timeout_s, stdin=stdin)

    @while_alive
    async def launch(self, argv: Sequence[str], *, timeout_s: float = 30.0) -> None:
        """Start a program in the user's session and return at once."""
        await self._session.guestd("launch a program in the session").launch(argv, timeout_s=timeout_s)

    @while_alive
    async def start_mcp_server(self, name: str, command: Sequence[str]) -> None:
        """Start an MCP server of the agent in the user's session; it lives as long as the guest."""
        await toolbox.start_server(self._session, name, command)

    @while_alive
    async def change_wallpaper(self, path: str, *, timeout_s: float = 30.0) -> None:
        """Show a picture of the guest's file system as the wallpaper."""
        await self._session.guestd("change the wallpaper").change_wallpaper(path, timeout_s=timeout_s)

    @while_alive
    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes | None:
        """Return a guest file's bytes through the agent; None if it does not exist. `~` is the user's home.

        Raises:
            GuestError: It is larger than `max_bytes`, or cannot be read.
        """
        return await self._session.read_file(path, max_bytes=max_bytes)

    @while_alive
    async def write_file(self, path: str, data: bytes) -> None:
        """Write a guest file as the session's user, creating parent directories; `~` is the user's home.

        If the image has no guestd, root owns the file.
        """
        await self._session.write_file(path, data)

    @while_alive
    async def with_guestd(self, work: Callable[[str], Coroutine[Any, Any, T]]) -> T:
        """Run work that calls the guest's HTTP service itself, given its URL on the host's loopback.

        Raises:
            GuestError: The image has no such service.
        """
        url = self._channels.guestd_url
        if url is None:
            raise GuestError(f"machine {self._channels.machine_id} has no guestd")
        return await work(url)

    @while_alive
    async def open_port(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a TCP port of the guest's loopback. The caller closes the connection.

        Raises:
            GuestError: Nothing listens on the port, or the image's service cannot forward ports.
        """
        self._session.guestd("forward a port")
        return await open_port(self._channels.guestd_url or "", port, machine_id=self._channels.machine_id)

    # The guard of every wait

    async def _alive(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` while the machine lives. Raises: MachineLost as soon as it does not."""
        if self._channels.lost.is_set():
            raise self._machine_lost()
        if self._loss_task is None and not self._is_closed:
            self._loss_task = asyncio.create_task(self._end_waits(), name=f"desktop-lost:{self._channels.machine_id}")
        # A timeout that the loss triggers: one more task per call would cost more than many calls do.
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.add(scope)
                try:
                    return await work()
                finally:
                    self._scopes.discard(scope)
        except Exception as error:
            if self._channels.lost.is_set():
                raise self._machine_lost() from error
            raise

    async def _end_waits(self) -> None:
        await self._channels.lost.wait()
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    def _machine_lost(self) -> MachineLost:
        reason = self._channels.lost_reason or "for an unknown reason"
        return MachineLost(f"machine {self._channels.machine_id} is gone: {reason}")

    def take_unrecorded(self) -> tuple[UnrecordedRequest, ...]:
        """Return the requests that its web recording does not have, since the last call."""
        return self._web.take_unrecorded(self._channels.machine_id) if self._web else ()

    async def _open_gateway(self) -> None:
        if self._web is None:
            return
        url = urlsplit(self._channels.guestd_url or "")
        if not url.hostname or not url.port:
            raise GuestError(f"machine {self._channels.machine_id} cannot reach any host: its image has no guestd")
        self._gateway = GuestGateway((url.hostname, url.port), self._web, machine_id=self._channels.machine_id)
        await self._gateway.open()


@contextmanager
def _timed(timings_ms: dict[str, float], phase: str) -> Iterator[None]:
    began_s = time.monotonic()
    with traces.timed(phase):
        yield
    timings_ms[phase] = (time.monotonic() - began_s) * 1000
