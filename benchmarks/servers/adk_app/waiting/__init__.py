"""An agent; see ``agent``."""

from . import agent as agent
