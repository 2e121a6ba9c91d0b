"""Contract of every hypervisor and its machines, as tests that a subclass runs on one implementation.

```python
class TestMachineContractOnFake(MachineContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def hypervisor(cls) -> AsyncIterator[Hypervisor]: ...

    @classmethod
    def make_spec(cls, machine_id: str) -> MachineSpec: ...
    @classmethod
    async def kill(cls, machine: Machine) -> None: ...
    @classmethod
    async def screendump(cls, machine: Machine) -> npt.NDArray[np.uint8]: ...
    @classmethod
    def leftovers(cls, hypervisor: Hypervisor, machine_id: str) -> list[str]: ...
    @classmethod
    async def snapshot_leftovers(cls, hypervisor: Hypervisor) -> list[str]: ...
```

Each class boots one machine and freezes it, because a boot under emulation can take a minute. Machines are tested on
forks of it; `create` is tested on machines that need not finish booting.
"""

import asyncio
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from cuaenv.actions import Click, Move, PressKeys, Wait
from envd.base.config import SettlePolicy
from envd.base.errors import GuestError, GuestUnresponsive, MachineLost
from envd.desktop.desktop import Desktop
from envd.desktop.observation import CursorMode, EncodedFrame, Encoding, Keyframe, ObservationOptions, TileDelta
from envd.hypervisor.machine import Hypervisor, Machine, MachineState, Snapshot
from tests.support.machine_contract.fixtures import new_machine_id, read_to_end
from tests.support.machine_contract.forks import ForkContract, TemplateContract

__all__ = ["ContainerContract", "MachineContract", "new_machine_id"]


def _rebuilt(sent: EncodedFrame, base_HWC: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.uint8]:
    """Rebuild a frame's pixels as specified in `cuaenv/v1/env.proto`."""
    match sent.content:
        case Keyframe(data=data):
            pixels = np.frombuffer(zstandard.decompress(data), np.uint8)
            return pixels.reshape(sent.height_px, sent.width_px, 3)
        case TileDelta(tiles=tiles, data=data):
            assert base_HWC is not None
            image_HWC, at = base_HWC.copy(), 0
            before = [base_HWC[t.y_px : t.y_px + t.height_px, t.x_px : t.x_px + t.width_px].tobytes() for t in tiles]
            known = zstandard.ZstdCompressionDict(b"".join(before), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            pixels = np.frombuffer(zstandard.ZstdDecompressor(dict_data=known).decompress(data), np.uint8)
            for tile in tiles:
                part = pixels[at : at + tile.width_px * tile.height_px * 3]
                image_HWC[tile.y_px : tile.y_px + tile.height_px, tile.x_px : tile.x_px + tile.width_px] = part.reshape(
                    tile.height_px, tile.width_px, 3
                )
                at += part.size
            return image_HWC
        case _:
            assert base_HWC is not None
            return base_HWC


_PROBE_PATH = "/tmp/envd-contract-probe"  # noqa: S108  (a path in the guest)


class ContainerContract(TemplateContract):
    """Tests of a hypervisor that cannot copy running machines, in addition to `TemplateContract`."""

    # Tests on the shared machine

    async def test_a_new_machine_runs_and_its_agent_answers(self, machine: Machine) -> None:
        assert machine.state is MachineState.RUNNING
        assert not machine.lost.is_set()
        assert machine.lost_reason == ""
        assert await machine.agent_command("guest-ping", timeout_s=self.response_timeout_s) == {}

    async def test_the_agent_runs_programs_and_returns_their_output(self, machine: Machine) -> None:
        assert await self.run(machine, "echo", "one two") == b"one two\n"

    async def test_an_agent_error_is_a_guest_error(self, machine: Machine) -> None:
        with pytest.raises(GuestError):
            await machine.agent_command("guest-no-such-command", timeout_s=self.response_timeout_s)
        with pytest.raises(GuestError):
            await machine.agent_command(
                "guest-file-open", {"path": "/no/such/file", "mode": "r"}, timeout_s=self.response_timeout_s
            )

    async def test_guestd_is_on_the_loopback_if_the_image_has_it(self, machine: Machine) -> None:
        url = machine.guestd_url
        assert (url is not None) == machine.spec.image.has_guestd
        assert url is None or url.startswith("http://127.0.0.1:")

    async def test_the_display_has_the_size_of_the_spec(self, machine: Machine) -> None:
        pixels = await self.screen(machine)
        spec = machine.spec
        assert pixels.shape == (spec.screen_height_px, spec.screen_width_px)

    async def test_input_changes_pixels(self, machine: Machine) -> None:
        await self.change_screen(machine)

    async def test_frames_rebuilt_from_deltas_equal_the_machines_screendump(self, machine: Machine) -> None:
        desktop = Desktop(machine)
        image_HWC: npt.NDArray[np.uint8] | None = None
        known_image_id, kinds = "", []
        try:
            for action in (Click(200, 200), Move(5, 5), PressKeys(keys=("alt", "tab")), Wait(timedelta(seconds=0.3))):
                await desktop.act(action)
                await desktop.settle(SettlePolicy(idle_ms=0, max_ms=3000))
                await machine.pause()  # Both must show the same instant.
                options = ObservationOptions(
                    encoding=Encoding.RAW_ZSTD, cursor=CursorMode.HIDDEN, known_image_id=known_image_id
                )
                sent = (await desktop.observe(options, refresh=True)).frame
                truth_HWC = await self.screendump(machine)
                await machine.resume()
                image_HWC = _rebuilt(sent, image_HWC)
                assert np.array_equal(image_HWC, truth_HWC)
                known_image_id = sent.image_id
                kinds.append(type(sent.content))
            assert kinds[0] is Keyframe
            assert Keyframe not in kinds[1:], "a click must be sent as a delta"
        finally:
            await desktop.close()

    async def test_pause_and_resume_are_idempotent(self, machine: Machine) -> None:
        await machine.pause()
        await machine.pause()
        states = [machine.state]
        await machine.resume()
        await machine.resume()
        assert [*states, machine.state] == [MachineState.PAUSED, MachineState.RUNNING]
        assert await machine.agent_command("guest-ping", timeout_s=self.response_timeout_s) == {}

    async def test_a_paused_machine_responds_only_after_resume(self, machine: Machine) -> None:
        await machine.pause()
        try:
            with pytest.raises(GuestUnresponsive):
                await machine.agent_command("guest-ping", timeout_s=0.2)
        finally:
            await machine.resume()
        assert await self.run(machine, "echo", "again") == b"again\n"

    async def test_usage_includes_shared_and_written_memory(self, machine: Machine) -> None:
        await self.write_file(machine, _PROBE_PATH, b"cost")
        usage = await machine.usage()
        assert usage.pss_bytes >= usage.private_dirty_bytes > 0

    async def test_reaping_keeps_the_machines_of_this_daemon(self, hypervisor: Hypervisor, machine: Machine) -> None:
        assert await hypervisor.reap() == []
        assert await machine.agent_command("guest-ping", timeout_s=self.response_timeout_s) == {}

    # Tests on separate machines, created or forked

    async def test_destroy_leaves_nothing_and_is_idempotent(self, hypervisor: Hypervisor) -> None:
        machine = await hypervisor.create(self.make_spec(new_machine_id()))
        assert self.leftovers(hypervisor, machine.machine_id) != []
        await asyncio.gather(*(machine.destroy() for _ in range(5)))
        await machine.destroy()
        assert self.leftovers(hypervisor, machine.machine_id) == []
        assert machine.state is MachineState.GONE
        assert machine.lost.is_set()
        assert machine.lost_reason

    async def test_destroying_a_fork_leaves_nothing(self, hypervisor: Hypervisor, template: Snapshot) -> None:
        machine = await hypervisor.fork(template, new_machine_id())
        assert self.leftovers(hypervisor, machine.machine_id) != []
        await asyncio.gather(*(machine.destroy() for _ in range(5)))
        assert self.leftovers(hypervisor, machine.machine_id) == []
        assert machine.state is MachineState.GONE
        assert machine.lost_reason

    async def test_every_call_on_a_destroyed_machine_raises_machine_lost(
        self, hypervisor: Hypervisor, template: Snapshot
    ) -> None:
        machine = await hypervisor.fork(template, new_machine_id())
        await machine.destroy()
        for call in (machine.open_display, machine.pause, machine.resume, machine.usage):
            with pytest.raises(MachineLost):
                await call()
        with pytest.raises(MachineLost):
            await machine.agent_command("guest-ping", timeout_s=1)

    async def test_a_machine_over_its_disk_quota_is_lost_with_the_reason(
        self, hypervisor: Hypervisor, template: Snapshot
    ) -> None:
        machine = await hypervisor.fork(template, new_machine_id())
        await machine.resume()
        await self.write_file(machine, _PROBE_PATH, b"x" * 4096)
        machine.enforce_disk_quota(1 << 40)
        assert not machine.lost.is_set()
        machine.enforce_disk_quota(4095)
        await machine.lost.wait()
        assert machine.state is MachineState.GONE
        assert "over its quota of 0 MiB" in machine.lost_reason
        with pytest.raises(MachineLost, match="over its quota"):
            await machine.agent_command("guest-ping", timeout_s=1)
        await machine.destroy()
        assert self.leftovers(hypervisor, machine.machine_id) == []

    async def test_a_cancelled_destroy_completes_before_the_cancellation_is_delivered(
        self, hypervisor: Hypervisor, template: Snapshot
    ) -> None:
        machine = await hypervisor.fork(template, new_machine_id())
        destroying = asyncio.create_task(machine.destroy())
        await asyncio.sleep(0)
        destroying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await destroying
        assert self.leftovers(hypervisor, machine.machine_id) == []

    async def test_a_cancelled_create_leaves_nothing(self, hypervisor: Hypervisor) -> None:
        for delay_s in self.cancel_after_s:
            spec = self.make_spec(new_machine_id())
            creating = asyncio.create_task(hypervisor.create(spec))
            await asyncio.sleep(delay_s)
            if creating.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await creating
            else:
                await (await creating).destroy()
            assert self.leftovers(hypervisor, spec.machine_id) == [], f"cancelled after {delay_s} s"

    async def test_a_machine_killed_from_outside_is_lost_with_a_reason(self, hypervisor: Hypervisor) -> None:
        async with self.new_machine(hypervisor) as machine:
            reader, writer = await machine.open_display()
            await self.kill(machine)
            async with asyncio.timeout(self.prompt_s):
                await machine.lost.wait()
                await read_to_end(reader)
            writer.close()
            assert machine.state is MachineState.GONE
            assert machine.lost_reason
        assert self.leftovers(hypervisor, machine.machine_id) == []

    async def test_a_command_in_flight_fails_promptly_when_the_machine_is_killed(
        self, hypervisor: Hypervisor, template: Snapshot
    ) -> None:
        # A new fork is paused, so it cannot respond before the kill.
        async with self.fork(hypervisor, template) as machine:
            command = asyncio.create_task(machine.agent_command("guest-ping", timeout_s=60))
            await asyncio.sleep(0.05)
            assert not command.done()
            await self.kill(machine)
            async with asyncio.timeout(self.prompt_s):
                with pytest.raises(MachineLost):
                    await command


class MachineContract(ContainerContract, ForkContract):
    """Tests of a hypervisor that can copy running machines: all of them."""
