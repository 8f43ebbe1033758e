"""The presets by the name under which they could first be imported; the table is ``stepengine.models.presets``."""

from __future__ import annotations

from stepengine.models.presets import PRESETS, Preset, preset_of

__all__ = ("PRESETS", "Preset", "preset_of")
