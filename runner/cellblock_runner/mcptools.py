"""Calls from generated modules of `mcptools` to tools.

    run(Params(...))  →  call(server, tool, params, Result)  →  host call `call_tool`  →  host  →
    answer  →  Result, or Reply

The host keeps the connections and credentials, checks the arguments again, and decides. This module
only makes calls convenient: arguments as JSON (`tool_models`), results as Python values
(`tool_values`), failures as exceptions. The warm process imports it if Pydantic is installed.
"""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any, TypeVar, overload

try:
    import pydantic
    from pydantic import BaseModel, TypeAdapter, ValidationError

    if tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 9):
        raise ImportError(f"it is version {pydantic.VERSION}")
except ImportError as cause:
    raise ImportError(
        "the modules of MCP servers need Pydantic 2.9 or newer, which this environment does not"
        f" have ({cause}); "
        "install it with %pip install 'pydantic>=2.9'",
        name="pydantic",
    ) from None

from . import host_calls
from .tool_models import Base64 as Base64
from .tool_models import Email as Email
from .tool_models import Model as Model
from .tool_models import Null as Null
from .tool_models import OneOf as OneOf
from .tool_models import Pattern as Pattern
from .tool_models import Sent as Sent
from .tool_models import Url as Url
from .tool_models import arguments, sent_as
from .tool_modules import modules_when_used as modules_when_used
from .tool_values import Audio as Audio
from .tool_values import Block as Block
from .tool_values import Image as Image
from .tool_values import Link as Link
from .tool_values import Reply as Reply
from .tool_values import Resource as Resource
from .tool_values import Text as Text
from .tool_values import block

T = TypeVar("T")


class ToolError(Exception):
    """The tool reported an error. The message is its text; `content` and `structured` are its
    complete result.
    """

    def __init__(
        self, message: str, content: list[Block] | None = None, structured: Any = None
    ) -> None:
        super().__init__(message)
        self.content = content if content is not None else []
        self.structured = structured


class ToolCallError(Exception):
    """The tool was not called, or did not answer. `reason` is a one-word reason; PROTOCOL.md lists
    them.
    """

    def __init__(self, message: str, reason: str = "other") -> None:
        super().__init__(message)
        self.reason = reason


class ToolCallDenied(ToolCallError):
    """The call is not allowed: by the policy, or by the person who was asked."""


class ToolCallTimeout(ToolCallError, TimeoutError):
    """The tool did not answer in time."""


class UnexpectedResult(UserWarning):
    """A server returned a result that does not match its schema."""


_ERRORS: dict[Any, type[ToolCallError]] = {"denied": ToolCallDenied, "timeout": ToolCallTimeout}


@overload
def call(server: str, tool: str, params: BaseModel | dict[str, Any] | None = None) -> Reply: ...
@overload
def call(
    server: str,
    tool: str,
    params: BaseModel | dict[str, Any] | None,
    result: type[T],
    *,
    wrapped: bool = False,
) -> T: ...
@overload
def call(
    server: str,
    tool: str,
    params: BaseModel | dict[str, Any] | None,
    result: Any,
    *,
    wrapped: bool = False,
) -> Any: ...
def call(
    server: str,
    tool: str,
    params: BaseModel | dict[str, Any] | None = None,
    result: Any = None,
    *,
    wrapped: bool = False,
) -> Any:
    """Calls a tool and waits. Returns a Reply, or with `result` a value of that type.

    Any thread may call while a cell runs. Raises ToolError if the tool reports an error,
    ToolCallError if it could not be called.
    """
    try:
        answer = host_calls.ask("call_tool", server=server, tool=tool, arguments=arguments(params))
    except host_calls.HostCallError as error:
        raise ToolCallError(str(error), "unavailable") from None
    return _value(answer, server, tool, result, wrapped)


@overload
async def call_async(
    server: str, tool: str, params: BaseModel | dict[str, Any] | None = None
) -> Reply: ...
@overload
async def call_async(
    server: str,
    tool: str,
    params: BaseModel | dict[str, Any] | None,
    result: type[T],
    *,
    wrapped: bool = False,
) -> T: ...
@overload
async def call_async(
    server: str,
    tool: str,
    params: BaseModel | dict[str, Any] | None,
    result: Any,
    *,
    wrapped: bool = False,
) -> Any: ...
async def call_async(
    server: str,
    tool: str,
    params: BaseModel | dict[str, Any] | None = None,
    result: Any = None,
    *,
    wrapped: bool = False,
) -> Any:
    """Like `call`, but other tasks of the event loop continue meanwhile. Cancelling the task
    cancels its call.
    """
    try:
        answer = await host_calls.ask_async(
            "call_tool", server=server, tool=tool, arguments=arguments(params)
        )
    except host_calls.HostCallError as error:
        raise ToolCallError(str(error), "unavailable") from None
    return _value(answer, server, tool, result, wrapped)


def _value(answer: dict[str, Any], server: str, tool: str, result: Any, wrapped: bool) -> Any:
    if not answer.get("ok"):
        reason = str(answer.get("reason") or "other")
        message = str(answer.get("text") or "the tool could not be called")
        raise _ERRORS.get(reason, ToolCallError)(message, reason)
    content = [block(raw) for raw in answer.get("content") or () if isinstance(raw, dict)]
    reply = Reply(content, answer.get("structured"))
    if answer.get("is_error"):
        raise ToolError(
            str(reply) or f"the tool {tool!r} reported an error without a text",
            content,
            reply.structured,
        )
    return reply if result is None else _typed(reply, server, tool, result, wrapped)


def _typed(reply: Reply, server: str, tool: str, result: Any, wrapped: bool) -> Any:
    """Returns the structured value in its type. A value that does not match is returned unchanged,
    with a warning: the server may be right.
    """
    value = reply.structured
    if value is None:
        value = _parsed(reply)
    if wrapped and isinstance(value, dict) and value.keys() == {"result"}:
        value = value["result"]
    try:
        return _adapter(result).validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the result"
        text = (
            f"{server}.{tool} returned a result that does not match its schema:"
            f" {place}: {problem['msg']}"
        )
        warnings.warn(text, UnexpectedResult, stacklevel=4)
    if value is None:
        return reply
    if isinstance(value, dict) and isinstance(result, type) and issubclass(result, BaseModel):
        return _unchecked(result, value)
    return value


def _parsed(reply: Reply) -> Any:
    """Parses a text as JSON, for servers that announce structured values and send texts."""
    try:
        return json.loads(str(reply)) if reply else None
    except ValueError:
        return None


@functools.lru_cache(maxsize=256)
def _cached_adapter(result: Any) -> TypeAdapter[Any]:
    return TypeAdapter(result)


def _adapter(result: Any) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(result)
    except TypeError:  # Not hashable: a type with a list in its metadata.
        return TypeAdapter(result)


def _unchecked(model: type[BaseModel], value: dict[str, Any]) -> BaseModel:
    """Creates an object from members that do not match, under the Python names of its fields."""
    names = {sent_as(name, field): name for name, field in model.model_fields.items()}
    return model.model_construct(None, **{names.get(key, key): each for key, each in value.items()})
