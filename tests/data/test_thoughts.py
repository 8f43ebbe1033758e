"""
One function tells what of a reply's text is thought and what is said, and loses nothing that is no thought.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.messages import AssistantMessage, TextPart, ThinkingPart
from stepengine.data.models import ModelReply
from stepengine.data.thoughts import TAGS, split_thoughts

THOUGHT = [
    ("  <think>deep</think>\n  The answer.", ("deep",), "The answer."),
    ("<thinking>a\nb</thinking>c", ("a\nb",), "c"),
    ("<think>never closed", ("never closed",), ""),
    ("<think></think>", (), ""),
    ("<think>a</think>\nb <think> c", ("a",), "b <think> c"),
    ("<think>a</think><think> is the tag.", ("a",), "<think> is the tag."),
    ("<think>a</thinking>b</think>c", ("a</thinking>b",), "c"),
    # The server swallowed the opening tag.
    ("It is\nshop.py</think>\n\nshop.py", ("It is\nshop.py",), "shop.py"),
    ("It is\r\n</think>\r\nshop.py", ("It is",), "shop.py"),
    ("</think>\nshop.py", (), "shop.py"),
    ("say `x` and `y\n</think>\nshop.py", ("say `x` and `y",), "shop.py"),
    ("see ```x``` here\n</think>\nshop.py", ("see ```x``` here",), "shop.py"),
    ("```\nx\n```\n</think>\nshop.py", ("```\nx\n```",), "shop.py"),
    ("<think>a</think>\nmore\n</think>\nb", ("a", "more"), "b"),
]
SAID = [
    "",
    "plain ",
    "a < b </b>\n",
    "The tag <think> opens; it loses nothing.",
    "A `</think>` in a sentence, and </think> too.",
    "ends with </think>",
    "```xml\n<think>\nx\n</think>\n```\nThat is the form.",
    "~~~~\n```\n</think>\n~~~~\ndone",
    "```\n</think>\nnever closed",
    "``a `</think>\n`` b",
    "The tag `\n</think>\n` is in `code`",
    "Write\n<think>\nx\n</think>\nas it is.",
]


@pytest.mark.spec("requirements:X53")
@pytest.mark.parametrize(("text", "thoughts", "said"), THOUGHT)
def test_thoughts_start_a_reply_or_end_at_their_own_tag(text, thoughts, said):
    assert (thoughts, said) == split_thoughts(text)


@pytest.mark.spec("requirements:X53")
@pytest.mark.parametrize("text", SAID)
def test_text_that_mentions_think_tags_is_unchanged(text):
    assert ((), text) == split_thoughts(text)


@pytest.mark.spec("requirements:X53")
@pytest.mark.parametrize("tag", TAGS)
@given(thought=st.text("ab <>/`\n"), said=st.text("ab ."))
def test_text_after_thoughts_is_never_lost(tag, thought, said):
    told = split_thoughts(f"<{tag}>{thought}</{tag}>\n\n{said}")

    assert said.strip() == told.said


@pytest.mark.spec("requirements:X53")
@given(st.text("ab .\n`~").map(str.strip))
def test_text_without_tags_is_unchanged(text):
    assert ((), text) == split_thoughts(text)
    assert text.strip() == split_thoughts(f"<think>x</think>{text}").said


@pytest.mark.spec("requirements:X53")
def test_messages_keep_raw_text_and_expose_said_text():
    parts = (ThinkingPart("hm"), TextPart("<think>a"), TextPart("b</think>c"))
    for whole in (AssistantMessage(parts), ModelReply(parts)):
        assert ("<think>ab</think>c", "c") == (whole.text, whole.text_without_thoughts)
