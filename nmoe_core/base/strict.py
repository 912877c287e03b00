"""Strict configuration tables: an unknown key, a wrong type or a missing field is a clear error."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails

from loader.errors import without_credentials
from nmoe_core.base.errors import ConfigError


class StrictModel(BaseModel):
    """A frozen table that refuses unknown keys, values of a wrong type, and infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=StrictModel)


def validate(model: type[Model], value: dict[str, Any], where: object) -> Model:
    """Check a table against its model. Raises as `refusing`."""
    with refusing(model, where):
        return model.model_validate(with_tuples(value))


@contextmanager
def refusing(model: type[BaseModel], where: object) -> Iterator[None]:
    """Turn a validation error of pydantic into one ConfigError, which names the first bad key and
    its value, and for an unknown key (E-CONFIG-KEY) the most similar known key."""
    try:
        yield
        return
    except ValidationError as error:
        first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = sorted(_known_keys(model, first["loc"][:-1]))
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        raise ConfigError(
            f"unknown key {key!r}", where=where, do=hint, code="E-CONFIG-KEY"
        ) from None
    found = None if first["type"] == "missing" else without_credentials(repr(first["input"]))[:120]
    message = first["msg"].removeprefix("Value error, ")
    what = f"{key}: {message}" if key else message
    cause = first.get("ctx", {}).get("error")
    code = cause.code if isinstance(cause, ConfigError) else None
    raise ConfigError(what, where=where, found=found if key else None, code=code) from None


def unknown_keys(model: type[BaseModel], found: dict[str, Any]) -> None:
    """Refuse keys of a table, from a validator of the table, like those that it does not have."""
    errors = [
        InitErrorDetails(type="extra_forbidden", loc=(key,), input=value)
        for key, value in found.items()
    ]
    if errors:
        raise ValidationError.from_exception_data(model.__name__, errors)


def with_tuples(value: Any) -> Any:
    """The value with lists turned into tuples, since frozen tables hold tuples."""
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def _known_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> set[str]:
    """Keys of the table at the path `loc`, which may go through nested tables and lists."""
    kinds: list[type[BaseModel]] = []
    for part in loc:
        info = model.model_fields.get(str(part))
        if info is not None:
            model = nested_model(info.annotation) or model
            kinds = nested_models(info.annotation)
        elif tagged := [kind for kind in kinds if _tag(kind) == part]:
            (model,) = tagged  # one of several kinds of table, told apart by their key `kind`
        elif info is None:
            model = getattr(model, "others", model)
    return set(model.model_fields) | getattr(model, "also_known", frozenset())


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The table that an annotation such as `Table | None` holds, if any."""
    return next(iter(nested_models(annotation)), None)


def nested_models(annotation: Any) -> list[type[BaseModel]]:
    """The tables that an annotation such as `tuple[One | Other, ...]` holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = getattr(annotation, "__args__", ())
    return [model for argument in arguments for model in nested_models(argument)]


def _tag(model: type[BaseModel]) -> object:
    """The value of a table's key `kind`, if it can have only one."""
    kind = model.model_fields.get("kind")
    return next(iter(get_args(kind.annotation)), None) if kind else None
