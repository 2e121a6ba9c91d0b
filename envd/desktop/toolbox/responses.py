"""Read the results of an MCP server as text, by the protocol's own types. Pure.

The protocol's client is not used: its session would live in the daemon, and a fork of a guest copies only what is in
the guest.
"""

import json

from mcp_types import CallToolResult, ListToolsResult, TextContent
from pydantic import JsonValue, ValidationError


def text_of(result: JsonValue, *, is_list: bool) -> tuple[str, bool]:
    """Return a result as text, and whether it reports an error of the tool.

    Raises:
        ValueError: It is not as the protocol says; names the field.
    """
    try:
        if is_list:
            return _tools(ListToolsResult.model_validate(result)), False
        called = CallToolResult.model_validate(result)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    parts = [block.text if isinstance(block, TextContent) else f"[{block.type}]" for block in called.content]
    if not parts and called.structured_content is not None:
        parts = [json.dumps(called.structured_content, ensure_ascii=False)]
    return "\n".join(parts), called.is_error


def _tools(listed: ListToolsResult) -> str:
    rows = [
        f"{tool.name}: {tool.description or ''}\n  {json.dumps(tool.input_schema, ensure_ascii=False)}"
        for tool in listed.tools
    ]
    return "\n".join(rows) or "[no tools]"
