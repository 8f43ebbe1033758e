"""
JSON for every stored type, both ways.

``STORED`` lists what can be stored; tags and member names are those of ``stepengine.data.stored``. How an object becomes JSON is in
``stepengine.data.object_codec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs

from stepengine.data.json import replace_lone_surrogates
from stepengine.data.object_codec import FORMAT_VERSION, ObjectCodec
from stepengine.data.stored import STORED_TYPES
from stepengine.data.typed_values import dump_model, is_model
from stepengine.errors import DataError

__all__ = (
    "FORMAT_VERSION",
    "STORED",
    "decode_stored",
    "decode_stored_or_json",
    "encode_stored",
    "encode_stored_or_json",
    "from_json",
    "get_tag",
    "is_stored",
    "plain",
    "to_json",
)

_CODEC = ObjectCodec(STORED_TYPES)
STORED = _CODEC.stored
"""Every class that can be stored, by its tag, the value of the member ``"type"``."""

is_stored = _CODEC.is_stored
get_tag = _CODEC.get_tag
# With the version of the form, for values that are stored alone (sessions, definitions). Values inside of a journal have
# the version of their journal, once.
to_json = _CODEC.to_json
from_json = _CODEC.from_json
encode_stored = _CODEC.encode_stored
decode_stored = _CODEC.decode_stored
encode_stored_or_json = _CODEC.encode_stored_or_json
decode_stored_or_json = _CODEC.decode_stored_or_json


# For display: a viewer that fails at one odd value shows nothing at all, so a value without a stored form is shown as
# well as possible. The result is never read back.
def plain(value: object) -> Any:
    """
    Return *value* as JSON for display; it never fails.

    Stored types become the result of ``encode_stored``, other attrs classes their shown fields, models JSON, all others text.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return _object_to_display_json(value)


def _object_to_display_json(value: Any) -> object:
    """Return an object as JSON for display: its stored form, else its fields or items, else its text."""
    if is_stored(type(value)):
        try:
            return encode_stored(value)
        except DataError:
            pass
    if attrs.has(type(value)):
        fields = {a.name: plain(getattr(value, a.name)) for a in attrs.fields(type(value)) if a.repr}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {plain(str(k)): plain(v) for k, v in value.items()}
    if is_model(value):
        try:
            return plain(dump_model(value))
        except Exception:  # noqa: BLE001 - serializers of the author's may raise anything
            return replace_lone_surrogates(repr(value))
    return plain(str(value))
