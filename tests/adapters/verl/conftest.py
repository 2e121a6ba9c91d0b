"""Fixtures; imports verl before the tests do: its imports warn of deprecations, which are errors in tests of ours."""

import re
import warnings
from pathlib import Path

import pytest

from trainer.learn.checkpoint import write_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.trainer.ppo.v1  # noqa: F401

#: verl requires the column, and recomputes it from the ids.
RETURNS = r"return BatchFeature(\1 | {'mm_token_type_ids': encoded['attention_mask']})"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose processor has the name and the return type of the model family's own, which verl requires."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    for file in (*model.glob("*.py"), *model.glob("*.json")):
        text = file.read_text(encoding="utf-8").replace("TinyProcessor", "Qwen3VLProcessor")
        text = text.replace("import ProcessorMixin", "import BatchFeature, ProcessorMixin")
        text = re.sub(r"return (\{name: encoded.*dict\(taken\))", RETURNS, text)
        file.write_text(text, encoding="utf-8")
    return model
