"""Parameters of a task in a file: one task for each of their values, with the texts that are marked `{{name}}`. Pure.

```yaml
- name: add-item
  parameters: {item: [eggs, milk], file: [shopping, store]}    # lists of equal length
  instruction: Add a line {{item}} to {{file}}.txt.
```
"""

import re
from collections.abc import Mapping

from envd.tasks.formats.entries import TaskFormatError
from envd.tasks.templates import split_of_id

_MARK = re.compile(r"\{\{(\w+)\}\}")
MAX_VARIANTS = 1000


def variants(suite: str, task: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the tasks of an entry with a name: NAME, NAME-2 and so on, all in one split. Without parameters, itself.

    Raises:
        TaskFormatError: The parameters are not lists of equal length, or are not those that the entry marks.
    """
    if "parameters" not in task:
        return [task]
    parameters, rest = task["parameters"], {name: value for name, value in task.items() if name != "parameters"}
    columns = parameters.values() if isinstance(parameters, Mapping) else ()
    if not isinstance(parameters, Mapping) or not all(isinstance(each, list) for each in columns):
        raise TaskFormatError("must be a mapping of names to lists of values", "parameters")
    counts = {len(each) for each in columns}
    if len(counts) != 1 or not 1 <= min(counts) <= MAX_VARIANTS:
        raise TaskFormatError(f"the lists need one length, of 1 to {MAX_VARIANTS} values", "parameters")
    marked = set(_MARK.findall(str(rest)))
    if marked != set(parameters):
        names = ", ".join(sorted(map(str, marked ^ set(parameters))))
        raise TaskFormatError(
            f"each must be marked as {{{{name}}}} in the task, and each mark be one: {names}", "parameters"
        )
    split = {"split": split_of_id(f"{suite}/{task['name']}")} if "split" not in task else {}
    rows = [dict(zip(parameters, values, strict=True)) for values in zip(*columns, strict=True)]
    return [
        {key: _filled(each, row) for key, each in rest.items()}
        | {"name": f"{task['name']}-{number}" if number > 1 else task["name"], **split}
        for number, row in enumerate(rows, 1)
    ]


def _filled(value: object, row: Mapping[str, object]) -> object:
    match value:
        case str():
            return _MARK.sub(lambda mark: str(row[mark[1]]), value)
        case list():
            return [_filled(each, row) for each in value]
        case Mapping():
            return {key: _filled(each, row) for key, each in value.items()}
        case _:
            return value
