"""Traces from a trainer's loop to the daemon's phases, received over OTLP on a real socket."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cuaenv.action_codec import to_proto
from cuaenv.client import AsyncEnvClient, Click, EpisodeNotFound
from cuaenv.v1 import env_pb2
from envd.base.config_sources import load
from envd.base.errors import ConfigError
from envd.base.telemetry import logs, traces
from tests.support import areal, slime
from tests.support.callers import connected
from tests.support.command import restored_logging
from tests.support.counting import AGENT, PLAN, SAY, TASK, turn_in
from tests.support.scripted_replies import ScriptedReplies
from tests.support.server import serve_fake, served_client
from trainer.adapters.areal.group import ArealConfig, play_group
from trainer.agent.attempts import play_task
from trainer.agent.settings import AgentSettings
from trainer.slime.hooks import generate
from trainer.tokens.chat import Chat


@dataclass
class Collector:
    """An OTLP receiver over HTTP."""

    url: str = ""
    service: str = ""
    spans: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Name, trace id, span id and parent's span id, in the order of their ends."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    """Requests hang until it is set."""

    async def receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.set()
        await self.answers.wait()
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.service = attributes["service.name"]
            for scope in resource.scope_spans:
                self.spans += [
                    (one.name, one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()) for one in scope.spans
                ]
        return web.Response()

    def names_under(self, span_id: str) -> set[str]:
        """Return the names of a span's children."""
        return {name for name, _, _, parent in self.spans if parent == span_id}


@asynccontextmanager
async def collecting(*, hangs: bool = False) -> AsyncIterator[Collector]:
    collector = Collector()
    if not hangs:
        collector.answers.set()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.receive)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        collector.answers.set()
        await runner.cleanup()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Make this process one that uses OpenTelemetry; return the spans of its own code."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return trace.format_span_id(span.context.span_id)


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return trace.format_trace_id(span.context.trace_id)


def tree_of(spans: tuple[ReadableSpan, ...]) -> set[tuple[str, str]]:
    """Return the names of spans with those of their parents."""
    names = {id_of(span): span.name for span in spans}
    return {(names[trace.format_span_id(span.parent.span_id)] if span.parent else "", span.name) for span in spans}


async def test_a_call_continues_the_clients_trace_and_has_its_phases(recorded: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer("test")
    async with (
        collecting() as collector,
        traces.exported_traces(collector.url),
        served_client(size=2, capacity=4) as (_, client),
    ):
        with tracer.start_as_current_span("rollout") as rollout:
            async with client.reset(TASK) as episode:
                await episode.step(Click(1, 1))
                async with client.fork(episode, count=1):
                    pass
                await episode.evaluate()
    context = rollout.get_span_context()
    trace_id, root = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
    calls = {name: span_id for name, _, span_id, parent in collector.spans if parent == root}
    assert {"Reset", "Step", "Fork", "Evaluate", "Close"} <= set(calls)
    assert {one[1] for one in collector.spans} == {trace_id}
    assert collector.names_under(calls["Step"]) >= {"queue", "input", "settle", "encode", "observe", "store"}
    assert collector.names_under(calls["Reset"]) >= {"acquire", "observe"}
    assert collector.names_under(calls["Fork"]) >= {"acquire", "freeze", "start"}
    assert collector.names_under(calls["Evaluate"]) >= {"evaluate", "store"}
    assert collector.service == "envd"


async def test_steps_of_a_stream_and_calls_without_a_client_trace_have_spans_of_their_own() -> None:
    async with (
        collecting() as collector,
        traces.exported_traces(collector.url),
        served_client() as (server, client),
        client.reset(TASK) as episode,
    ):
        await episode.step(Click(1, 1))
        step = env_pb2.StepRequest(
            request_id="r-1", episode_id=episode.episode_id, step_index=1, actions=[to_proto(Click(1, 1))]
        )
        async with connected(server.address) as stub:
            headers = (("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"),)
            call = stub.StreamSteps(iter([env_pb2.StreamStepsRequest(step=step)]), metadata=headers)
            assert [response.request_id async for response in call] == ["r-1"]
    (own,) = [parent for name, _, _, parent in collector.spans if name == "Step"]
    assert own == ""
    (streamed,) = [one for one in collector.spans if one[0] == "StreamSteps"]
    assert (streamed[1], streamed[3]) == ("ab" * 16, "cd" * 8)
    assert collector.names_under(streamed[2]) >= {"input", "settle", "observe"}


async def test_logs_of_a_failed_call_carry_the_trace(recorded: InMemorySpanExporter) -> None:
    stream = io.StringIO()
    async with (
        collecting() as collector,
        traces.exported_traces(collector.url),
        served_client() as (_, client),
        client.reset(TASK) as episode,
    ):
        await episode.close()
        tracer = trace.get_tracer("test")
        with logged(stream), tracer.start_as_current_span("rollout") as rollout, pytest.raises(EpisodeNotFound):
            await episode.observe()
    trace_id = trace.format_trace_id(rollout.get_span_context().trace_id)
    (line,) = [json.loads(line) for line in stream.getvalue().splitlines() if "Observe failed" in line]
    assert line["trace_id"] == trace_id


@contextmanager
def logged(stream: io.StringIO) -> Iterator[None]:
    with restored_logging():
        logs.setup(log_format="json", stream=stream)
        yield


async def test_a_collector_that_hangs_costs_spans_and_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_QUEUE_SIZE": 16, "MAX_EXPORT_BATCH_SIZE": 4, "SCHEDULE_DELAY": 1}.items():
        monkeypatch.setenv(f"OTEL_BSP_{name}", str(value))
    async with (
        collecting(hangs=True) as collector,
        traces.exported_traces(collector.url),
        served_client() as (_, client),
        client.reset(TASK) as episode,
    ):
        await collector.asked.wait()
        await episode.step(Click(1, 1))
        for _ in range(100):
            with traces.timed("waits"):
                pass
        assert collector.spans == []
        collector.answers.set()
    assert len([name for name, *_ in collector.spans if name == "waits"]) <= 16
    assert collector.spans


async def test_the_daemon_ends_while_a_collector_hangs() -> None:
    async with collecting(hangs=True) as collector:
        async with (
            traces.exported_traces(collector.url, flush_timeout_s=0.1),
            served_client() as (_, client),
            client.reset(TASK),
        ):
            pass
        assert not collector.answers.is_set()


async def test_the_agents_loop_has_spans_of_groups_episodes_and_turns(recorded: InMemorySpanExporter) -> None:
    async with collecting() as collector, traces.exported_traces(collector.url), served_client() as (_, client):
        model = ScriptedReplies([SAY(turn) for turn in PLAN])
        await play_task(client, TASK, lambda: model, settings=AgentSettings(max_turns=4, coordinates="pixels"))
    spans = recorded.get_finished_spans()
    assert tree_of(spans) >= {
        ("", "group"),
        ("group", "episode"),
        ("episode", "turn"),
        ("turn", "generate"),
        ("turn", "step"),
        ("episode", "evaluate"),
    }
    steps = {id_of(span) for span in spans if span.name == "step"}
    assert {parent for name, _, _, parent in collector.spans if name == "Step"} == steps
    (group,) = [id_of(span) for span in spans if span.name == "group"]
    assert "Reset" in collector.names_under(group)


async def test_the_trace_passes_through_slimes_and_areals_rollouts(recorded: InMemorySpanExporter) -> None:
    def counting(prompt: str) -> str:
        return SAY(PLAN[turn_in(prompt) - 1])

    tracer = trace.get_tracer("test")
    async with collecting() as collector, traces.exported_traces(collector.url), serve_fake() as server:
        with tracer.start_as_current_span("slime"), slime.stand_in_slime(slime.ScriptedEngine(counting)):
            mapping = {"hosts": [server.address], "engine_timeout_s": 60.0, "agent": AGENT}
            sample = slime.Sample(group_index=0, index=0, metadata={"task_id": TASK})
            parameters = {"temperature": 1.0, "max_new_tokens": 400}
            await generate(slime.stand_in_args(mapping, n_samples_per_prompt=1), sample, parameters)
        config = ArealConfig.from_mapping({"hosts": [server.address], "group_size": 1, "agent": AGENT})
        chat = Chat(slime.Tokenizer(), slime.Processor())
        async with AsyncEnvClient(config.hosts) as client:
            with tracer.start_as_current_span("areal"):
                engine = areal.ScriptedEngine(counting)
                await play_group(client, {"task_id": TASK}, engine.ask, chat=chat, config=config)
    roots = {span.name: trace_of(span) for span in recorded.get_finished_spans() if span.parent is None}
    assert set(roots) == {"slime", "areal"}
    steps = [trace_id for name, trace_id, _, _ in collector.spans if name == "Step"]
    assert sorted(steps) == sorted([roots["slime"]] * 3 + [roots["areal"]] * 3)


def test_nothing_of_opentelemetry_is_imported_when_traces_are_off() -> None:
    code = (
        "import sys, envd.daemon.composition, trainer.agent.attempts; print([m for m in sys.modules if 'opentel' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


async def test_without_the_packages_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"opentelemetry\.exporter.*\[otlp\]"):
        async with traces.exported_traces("http://127.0.0.1:1"):
            pass


@pytest.mark.parametrize("value", ["127.0.0.1:4318", "http://", "ftp://host", "http://user:secret@host"])
def test_a_malformed_endpoint_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint"):
        load(flags={"telemetry.otlp_endpoint": value})
