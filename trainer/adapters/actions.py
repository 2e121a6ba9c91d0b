"""Actions as JSON objects, for frameworks whose agents send JSON: `{"action": "click", "x": 3, "y": 4}`.

Points are pixels of the latest picture.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from cuaenv.action_codec import FORMS, BadAction, from_json, to_json
from cuaenv.client import Action
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError


def _validated(value: Any) -> Action:
    try:
        return from_json(value)
    except BadAction as error:
        # Frameworks send pydantic's errors as JSON, which an exception in them would prevent.
        raise PydanticCustomError("bad_action", "{problem}", {"problem": str(error)}) from error


ActionForm = Annotated[
    Action,
    PlainValidator(_validated),
    PlainSerializer(to_json),
    WithJsonSchema({"oneOf": [form.schema() for form in FORMS.values()]}),
]
"""An action as a pydantic type: frameworks publish its JSON schema, and an agent's arguments become actions."""


def read_actions(data: Sequence[Any] | str | bytes) -> list[Action]:
    """Return the actions of a list of objects, or of its JSON text.

    Raises:
        BadAction: The input is not a list of actions; the error names the field, such as `actions.0.click.y`.
    """
    try:
        values = json.loads(data) if isinstance(data, str | bytes) else data
    except ValueError as error:
        raise BadAction("actions", f"is not JSON: {error}") from error
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise BadAction("actions", "give a list of at least one action")
    actions = []
    for index, value in enumerate(values):
        try:
            actions.append(from_json(value))
        except BadAction as error:
            raise BadAction(f"actions.{index}.{error.field}", f"{error.problem}; see the schema of actions") from error
    return actions
