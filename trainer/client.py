"""The names of `cuaenv.client`, under their path of release 0.2.0."""

from cuaenv.client import *  # noqa: F403
from cuaenv.client import __all__ as __all__  # noqa: PLC0414
