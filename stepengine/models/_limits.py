"""
Context windows and largest outputs of models that the price data lack. Data, no I/O.

The largest outputs of Claude models are in ``models/anthropic/families.py``.
"""

from __future__ import annotations

import re

import attrs

from stepengine.models.base import ModelInfo

K128, K256, M1 = 128_000, 262_144, 1_048_576
"""Sizes of windows in tokens that several providers use."""

# A pattern for the whole name, the window, and the largest reply; from the models' pages at ai.google.dev, docs.mistral.ai
# and platform.openai.com, and the catalogue of models.dev (October 2026). A reply of Mistral's models may fill the window.
LIMITS = (
    (r"gemini-(?:2\.5|[3-9](?:\.\d)?)-(?:pro|flash|flash-lite)(?:-(?:preview|latest|\d)(?!.*(?:tts|image|audio|live)).*)?", M1, 65_536),
    (r"gemini-(?:pro|flash|flash-lite)-latest", M1, 65_536),
    (r"gemini-2\.0-flash(?:-lite)?(?:-\d+)?", M1, 8_192),
    (r"mistral-large-4.*", M1, M1),
    (r"mistral-(?:large|medium|small)-latest|mistral-large-2512|mistral-medium-(?:3-5|2604).*|mistral-small-(?:4|2603)", K256, K256),
    (r"ministral-(?:8b|14b)-(?:latest|2512)|devstral-(?:medium-)?(?:latest|2512)", K256, K256),
    (r"ministral-3b-(?:latest|2512)", 131_072, 131_072),
    (r"magistral-(?:medium|small)-latest", K128, 16_384),
    (r"pixtral-large-latest", K128, K128),
    (r"codestral-(?:latest|2508)", 256_000, 256_000),
    (r"gpt-4o(?:-mini)?(?:-\d.*)?|gpt-5(?:\.\d+)?-chat.*", K128, 16_384),
    (r"gpt-4\.1.*", 1_047_576, 32_768),
    (r"o1(?:-pro)?(?:-\d.*)?|o3.*|o4-mini.*", 200_000, 100_000),
    (r"gpt-5(?:-(?!chat).*|\.\d+.*)?", None, K128),
)  # fmt: skip


def fill_model_limits(model: str, info: ModelInfo) -> ModelInfo:
    """Return *info* with missing limits of *model* filled from ``LIMITS``."""
    name = model.rpartition("/")[2]
    window, most = next(
        ((window, most) for pattern, window, most in LIMITS if re.fullmatch(pattern, name)), (None, None)
    )
    return attrs.evolve(
        info,
        context_window=window if info.context_window is None else info.context_window,
        max_output=most if info.max_output is None else info.max_output,
    )
