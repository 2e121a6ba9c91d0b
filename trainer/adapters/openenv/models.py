"""Messages of the environment."""

import base64
import io
from typing import TYPE_CHECKING

from openenv.core.env_server.types import Action, Observation
from pydantic import Field

from trainer.adapters.actions import ActionForm

if TYPE_CHECKING:
    from PIL import Image


class DesktopAction(Action):
    """Actions of one step, performed in order."""

    actions: list[ActionForm] = Field(min_length=1, max_length=64)


class DesktopObservation(Observation):
    """The result of a reset or a step. `metadata["void"]` is the reason if the episode was lost and has no reward."""

    instruction: str = ""
    """The task's instruction."""
    screenshot: str = ""
    """The picture as a PNG in base64; empty if the reset asked for none."""
    errors: list[str] = Field(default_factory=list)
    """One per action: why it failed; empty if it was performed."""
    outputs: list[str] = Field(default_factory=list)
    """One per action: the result of a tool; empty for other actions."""
    end_reason: str = ""
    """Why the episode ended."""

    @property
    def image(self) -> "Image.Image":
        """The picture. Raises: ValueError: There is none."""
        from PIL import Image  # noqa: PLC0415 -- optional: needed for images only

        if not self.screenshot:
            raise ValueError("the observation has no screenshot; reset with pictures=True")
        return Image.open(io.BytesIO(base64.b64decode(self.screenshot)))
