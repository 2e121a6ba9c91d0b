"""The text of docs/api.md, from the comments of the contract."""

import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)
from grpc_tools import protoc  # type: ignore[import-untyped]

from cuaenv.capabilities import CAPABILITIES

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "cuaenv/v1/env.proto"

_CAPABILITIES = (
    "`Server.capabilities` names the additions to the contract that a release of the daemon has. It ignores",
    "fields that it does not know, so ask for the name before you rely on one. `client.capabilities()` returns the",
    "names that all hosts have.",
)

# Field numbers in descriptor.proto: the path of a comment consists of them and of indexes.
_FILE_PACKAGE, _FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 2, 4, 5, 6
_SERVICE_METHOD, _MESSAGE_FIELD, _MESSAGE_ENUM, _ENUM_VALUE = 2, 2, 4, 2

#: Path of a declaration in a file: field numbers and indexes.
Location = tuple[int, ...]
_SCALARS = {
    FieldDescriptorProto.TYPE_DOUBLE: "double",
    FieldDescriptorProto.TYPE_INT32: "int32",
    FieldDescriptorProto.TYPE_INT64: "int64",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
}


def text() -> str:
    """Return the text of the page as Markdown.

    Raises:
        RuntimeError: protoc rejected the contract; its errors are on stderr.
    """
    return "\n".join(_Page(_described()).lines()).rstrip() + "\n"


def _described() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "env.binpb")
        arguments = [f"-I{ROOT / 'proto'}", f"-I{files('grpc_tools') / '_proto'}", "--include_source_info"]
        status = protoc.main(["protoc", *arguments, f"--descriptor_set_out={output}", SOURCE])
        if status:
            raise RuntimeError(f"protoc exited with status {status} on {SOURCE}")
        return FileDescriptorSet.FromString(output.read_bytes()).file[0]


class _Page:
    """Renders the page of one file, in the order of its declarations."""

    def __init__(self, described: FileDescriptorProto) -> None:
        self._file = described
        self._prefix = f".{described.package}."
        self._comments: dict[Location, list[str]] = {
            tuple(location.path): [line.removeprefix(" ") for line in location.leading_comments.splitlines()]
            for location in described.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        yield from self._comments[(_FILE_PACKAGE,)]
        yield ""
        yield f"Package `{self._file.package}`."
        yield ""
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (_FILE_SERVICE, index))
        yield from _capabilities()
        yield from ("## Messages", "")
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (_FILE_MESSAGE, index))
        yield from ("## Enums", "")
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_FILE_ENUM, index), enum.name)

    def _service(self, service: ServiceDescriptorProto, path: Location) -> Iterator[str]:
        yield from (f"## Service {service.name}", "", *self._comments[path], "")
        for index, method in enumerate(service.method):
            yield from self._method(method, (*path, _SERVICE_METHOD, index))

    def _method(self, method: MethodDescriptorProto, path: Location) -> Iterator[str]:
        request = ("stream " if method.client_streaming else "") + self._link(method.input_type)
        response = ("stream " if method.server_streaming else "") + self._link(method.output_type)
        yield from (f"### {method.name}", "", f"{request} → {response}", "", *self._comments[path], "")

    def _message(self, message: DescriptorProto, path: Location) -> Iterator[str]:
        yield from (f"### {message.name}", "")
        if self._comments.get(path):
            yield from (*self._comments[path], "")
        if message.field:
            yield from ("| field | type | |", "|---|---|---|")
            for index, field in enumerate(message.field):
                comment = _one_line(self._comments.get((*path, _MESSAGE_FIELD, index), []))
                yield f"| `{field.name}` = {field.number} | {self._type(field, message)} | {comment} |"
            yield ""
        else:
            yield from ("No fields.", "")
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _MESSAGE_ENUM, index), f"{message.name}.{enum.name}")

    def _enum(self, enum: EnumDescriptorProto, path: Location, name: str) -> Iterator[str]:
        yield from (f"### {name}", "", *self._comments.get(path, []), "", "| value | |", "|---|---|")
        for index, value in enumerate(enum.value):
            comment = _one_line(self._comments.get((*path, _ENUM_VALUE, index), []))
            yield f"| `{value.name}` = {value.number} | {comment} |"
        yield ""

    def _type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        entry = next((nested for nested in message.nested_type if field.type_name.endswith(f".{nested.name}")), None)
        if entry is not None and entry.options.map_entry:
            key, value = (self._scalar_or_link(part) for part in entry.field)
            return f"map of {key} to {value}"
        kind = self._scalar_or_link(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {kind}"
        if field.HasField("oneof_index") and not field.proto3_optional:
            return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return f"optional {kind}" if field.proto3_optional else kind

    def _scalar_or_link(self, field: FieldDescriptorProto) -> str:
        return self._link(field.type_name) if field.type_name else _SCALARS[field.type]

    def _link(self, type_name: str) -> str:
        if not type_name.startswith(self._prefix):
            return f"`{type_name.removeprefix('.')}`"
        name = type_name.removeprefix(self._prefix)
        return f"[{name}](#{name.lower().replace('.', '')})"


def _capabilities() -> Iterator[str]:
    yield from ("## Capabilities", "", *_CAPABILITIES, "", "| name | use | |", "|---|---|---|")
    for name, capability in CAPABILITIES.items():
        yield f"| `{name}` | {', '.join(f'`{element}`' for element in capability.elements)} | {capability.text} |"
    yield ""


def _one_line(comment: Sequence[str]) -> str:
    return " ".join(comment).replace("|", "\\|")
