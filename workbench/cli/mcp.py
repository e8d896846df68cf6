"""`workbench mcp`: the functions of `workbench.cli.tools` as tools of the Model Context Protocol, over stdio."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import workbench
from workbench.atomic import standard
from workbench.cli.terminal import safe_lines
from workbench.errors import SpecError, WorkbenchError

if TYPE_CHECKING:
    from mcp.server import MCPServer
    from mcp.types import CallToolResult

    from workbench.cli.tools import Answer

INSTRUCTIONS = (
    "Tells if two configurations of an RL loss give every parameter the same gradient. Only the verdicts 'equal' "
    "and 'within budget' (of translate: 'same') are agreement; 'vacuous', 'unsound baseline' and 'cannot say' are not. "
    "Paths are relative to the folder in which the server was started."
)
_WORK = threading.Lock()
"""One tool at a time: each sets torch's defaults, and two at once would only share the cores."""


def mcp(*, folder: Path | None = None) -> int:
    """Serve compare, diagnose, bisect, prove, translate and status to a program, over stdin and stdout (MCP).

    Needs the extra: pip install 'workbench[mcp]'. It ends when its client closes stdin.

    Args:
        folder: Folder that relative paths and names of experiments are looked up in; by default the current one.
    """
    if folder is not None:
        if not folder.is_dir():
            raise SpecError(
                f"mcp --folder {folder}",
                found="a file" if folder.exists() else "nothing there",
                rule="a folder",
                fix="name the folder of your project",
            )
        os.chdir(folder)
    server().run("stdio")  # what is printed meanwhile, also by children, goes to stderr: the transport sees to it
    return 0


def server() -> MCPServer:
    """Return the server with its tools.

    Raises:
        SpecError: the extra is not installed.
    """
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise SpecError(
            "workbench mcp",
            found=str(error),
            rule="the extra mcp is installed: the package mcp, 2.3 or later",
            fix="pip install 'workbench[mcp]'",
        ) from None
    from workbench.cli.tools import TOOLS  # torch; `--help` and a missing extra are answered without it

    result = MCPServer("workbench", version=workbench.__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    for function, reads in TOOLS.items():
        hints = ToolAnnotations(read_only_hint=reads, destructive_hint=False, open_world_hint=False)
        result.add_tool(_tool(function), annotations=hints, structured_output=False)
        _refuse_unknown_arguments(result, function.__name__)
    return result


def _tool(function: Callable[..., Answer]) -> Callable[..., Any]:
    """Return a function as a tool: in a thread, so that a cancelled call is answered at once; errors as results."""
    import anyio.to_thread

    queue = anyio.CapacityLimiter(1)

    @functools.wraps(function)
    async def call(**arguments: Any) -> CallToolResult:
        work = functools.partial(_result, function, arguments)
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=queue)

    return call


def _result(function: Callable[..., Answer], arguments: dict[str, Any]) -> CallToolResult:
    from mcp.types import CallToolResult, TextContent

    try:
        with _WORK:
            answer = function(**arguments)
    except WorkbenchError as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        data = {"error": {"type": type(error).__name__, **error.parts}}
        return CallToolResult(content=[TextContent(text=text)], structured_content=data, is_error=True)
    text = "\n".join(safe_lines(answer.text))
    return CallToolResult(content=[TextContent(text=text)], structured_content=standard(answer.data))


def _refuse_unknown_arguments(server: MCPServer, name: str) -> None:
    """Have a tool refuse an argument that it would not use; the SDK (2.3) drops it without a word."""
    tool = server._tool_manager.get_tool(name)
    assert tool is not None, "added just now"
    tool.fn_metadata.arg_model.model_config["extra"] = "forbid"
    tool.fn_metadata.arg_model.model_rebuild(force=True)
    tool.parameters["additionalProperties"] = False
