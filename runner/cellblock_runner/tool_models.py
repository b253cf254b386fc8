"""Models of generated modules: the base of their classes, field types that Pydantic does not have,
and the serialization of a model.

A field is sent if it was set, under its name in the schema. Texts with a format are sent as they
were written. Constraints that cannot be checked here are not: the host checks every argument
against the schema itself.
"""

from __future__ import annotations

import ast
import base64
import functools
import inspect
import math
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Union, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
)

# Also used by other packages that extend models.
from pydantic._internal._model_construction import ModelMetaclass
from pydantic.fields import FieldInfo

from .tool_modules import stamp

# The context passed to `model_dump` when its result goes to a server.
_SENDING = {"cellblock": "sending"}
# The largest integer that every JSON parser reads exactly.
_MAX_SAFE_INTEGER = 2**53
# JSON parsers have limits of their own; the host's is 128 levels, some of which belong to the
# frame.
_MAX_LEVELS = 100
_TOO_DEEP = (
    f"the arguments are nested more than {_MAX_LEVELS} levels deep;"
    " send a flatter value, or JSON in a text"
)


class _NullIsSent:
    """Marks that null is a value of a field, and not the absence of one."""

    def __repr__(self) -> str:
        return "Null"


# For an optional field: with `| Null`, a `None` that is set is sent as null; with `| None`, it is
# the same as omitting the field.
Null = Annotated[None, _NullIsSent()]


class _AlwaysSent:
    """Marks a field that is sent even if it was not set."""

    def __repr__(self) -> str:
        return "Sent"


# For a field that has a default although it must be sent.
Sent = _AlwaysSent()


class Pattern(AfterValidator):
    """A text in which this expression is found. An expression that is invalid in Python is not
    checked here; the host checks it too.
    """

    def __init__(self, expression: str) -> None:
        def check(text: str) -> str:
            compiled = _compiled(expression)
            if compiled is not None and compiled.search(text) is None:
                raise ValueError(f"does not match {expression!r}")
            return text

        super().__init__(check)
        self.__dict__["_repr"] = f"Pattern({expression!r})"

    def __repr__(self) -> str:
        return str(self.__dict__["_repr"])


@functools.cache
def _compiled(expression: str) -> re.Pattern[str] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        return None


class OneOf(AfterValidator):
    """One of these values, for those that `Literal` cannot hold."""

    def __init__(self, values: list[Any]) -> None:
        def check(value: Any) -> Any:
            if not any(
                value == each and isinstance(value, bool) == isinstance(each, bool)
                for each in values
            ):
                raise ValueError(f"is none of {values!r}")
            return value

        super().__init__(check)
        self.__dict__["_repr"] = f"OneOf({values!r})"

    def __repr__(self) -> str:
        return str(self.__dict__["_repr"])


def _check_url(text: str) -> str:
    _url().validate_python(text)
    return text


@functools.cache
def _url() -> TypeAdapter[Any]:
    from pydantic import AnyUrl  # Takes longer to import than everything here.

    return TypeAdapter(AnyUrl)


def _as_text(value: Any) -> Any:
    return value if isinstance(value, (str, bytes)) else str(value)


def _check_email(text: str) -> str:
    name, at, host = text.rpartition("@")
    if not (name and at and host) or re.search(r"\s", text):
        raise ValueError("is not an email address")
    return text


def _from_base64(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


# Texts with these formats are sent as they were written.
Url = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_url)]
Email = Annotated[str, AfterValidator(_check_email)]
# Bytes that are sent as base64. A text is assumed to be base64 already.
Base64 = Annotated[
    bytes,
    BeforeValidator(_from_base64),
    PlainSerializer(
        lambda value: base64.b64encode(value).decode(), return_type=str, when_used="json"
    ),
]


def _documentation(model: type[BaseModel], own: str | None) -> str | None:
    """Returns the docstring of a model: its own, followed by the texts below its fields in the
    source.
    """
    texts = _texts_below_fields(model)
    kinds = getattr(model, "__annotations__", {})
    lines: list[str] = []
    for name, field in model.model_fields.items():
        default = (
            ""
            if field.is_required() or field.default_factory is not None
            else f" = {field.default!r}"
        )
        sent_as = (
            ""
            if field.serialization_alias is None
            else f"  (sent as {field.serialization_alias!r})"
        )
        lines.append(f"{name}: {kinds.get(name, 'Any')}{default}{sent_as}")
        lines += [f"    {texts[name]}"] if name in texts else []
    return (
        "\n\n".join(part for part in (inspect.cleandoc(own or ""), "\n".join(lines)) if part)
        or None
    )


def _texts_below_fields(model: type[BaseModel]) -> dict[str, str]:
    module = sys.modules.get(model.__module__)
    file = getattr(module, "__file__", None)
    return _texts_in(file, stamp(file)).get(model.__qualname__, {}) if isinstance(file, str) else {}


@functools.lru_cache(maxsize=16)
def _texts_in(file: str, _stamp: Any) -> dict[str, dict[str, str]]:
    """Returns the texts below the fields of all classes in a file, which is read once for all of
    them.
    """
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    return {
        node.name: dict(_texts_of(node.body))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _texts_of(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement, below in zip(body, body[1:]):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                yield statement.target.id, " ".join(below.value.value.split())


if TYPE_CHECKING:
    # Type checkers recognize a model by this metaclass, not by a subclass of it.
    _ShortlyListed = ModelMetaclass
else:

    class _ShortlyListed(ModelMetaclass):
        """Lists only the fields of a model, so that `help` shows these and not the hundred methods
        of Pydantic.
        """

        def __dir__(cls) -> list[str]:
            return list(cls.__dict__.get("__pydantic_fields__", ()))


class Model(BaseModel, metaclass=_ShortlyListed):
    """An object of a schema. Fields are set by their Python names or by the names in the schema,
    and sent under the latter.
    """

    model_config = ConfigDict(
        allow_inf_nan=False,  # JSON has no such numbers.
        defer_build=True,  # A module has many classes of which a cell uses one.
        populate_by_name=True,
        protected_namespaces=(),
        # So that they are detected, and refused, inside untyped values.
        ser_json_inf_nan="constants",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.__doc__ = _documentation(cls, cls.__dict__.get("__doc__"))

    @model_serializer(mode="wrap")
    def _serialized(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        values = handler(self)
        if info.context is not _SENDING:
            return values
        for name, field in type(self).model_fields.items():
            if field.is_required() or Sent in field.metadata:
                continue
            key = sent_as(name, field)
            was_set = name in self.model_fields_set
            if not was_set or (
                getattr(self, "__dict__", {}).get(name) is None
                and name not in _nullable(type(self))
            ):
                values.pop(key, None)
        return values


def sent_as(name: str, field: FieldInfo) -> str:
    """Returns the name of a field in the schema."""
    return name if field.serialization_alias is None else field.serialization_alias


@functools.cache
def _nullable(model: type[BaseModel]) -> frozenset[str]:
    """Returns the fields for which null is a value."""
    return frozenset(
        name
        for name, field in model.model_fields.items()
        if _admits_null(field.annotation, field.metadata)
    )


def _admits_null(annotation: Any, metadata: Iterable[Any] = ()) -> bool:
    if annotation is Any or any(
        isinstance(each, _NullIsSent)
        for each in (*metadata, *getattr(annotation, "__metadata__", ()))
    ):
        return True
    return (
        any(_admits_null(part) for part in get_args(annotation)) if _is_union(annotation) else False
    )


def _is_union(annotation: Any) -> bool:
    return (
        getattr(annotation, "__origin__", None) is Union or type(annotation).__name__ == "UnionType"
    )


def arguments(params: BaseModel | dict[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments to send for `params`: the fields that were set, under the names of the
    schema, as JSON values.
    """
    if params is None:
        return {}
    try:
        values = _dumped(params)
    except (ValueError, RecursionError) as error:
        # Pydantic stops at 255 levels, and then reports a circular reference.
        if isinstance(error, RecursionError) or "depth exceeded" in str(error):
            raise ValueError(_TOO_DEEP) from None
        raise
    if not isinstance(values, dict):
        raise TypeError(f"the arguments of a tool are an object, not {type(values).__name__}")
    return cast("dict[str, Any]", _as_json(values))


def _dumped(params: BaseModel | dict[str, Any]) -> Any:
    if not isinstance(params, BaseModel):
        return _untyped().dump_python(params, mode="json", by_alias=True, context=_SENDING)
    with warnings.catch_warnings():
        # Objects that were changed after validation are left to the host to check.
        warnings.filterwarnings("ignore", category=UserWarning, module="pydantic")
        return params.model_dump(mode="json", by_alias=True, context=_SENDING)


@functools.cache
def _untyped() -> TypeAdapter[dict[str, Any]]:
    return TypeAdapter(dict[str, Any], config=ConfigDict(ser_json_inf_nan="constants"))


def _as_json(value: Any, levels: int = _MAX_LEVELS) -> Any:
    """Converts whole numbers to integers (`5.0` to `5`, which is the same in JSON), and rejects
    values that JSON does not have or that are too deep.
    """
    if isinstance(value, (dict, list)) and not levels:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict):
        return {key: _as_json(each, levels - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_json(each, levels - 1) for each in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"JSON has no number {value}")
        return int(value) if value.is_integer() and abs(value) < _MAX_SAFE_INTEGER else value
    return value
