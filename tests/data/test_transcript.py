"""
The history: versions never change, appends copy nothing, calls and results pair, derived values are computed once.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from stepengine.data.messages import AssistantMessage, ToolCallPart, ToolMessage, ToolResult, UserMessage
from stepengine.data.transcript import Transcript
from stepengine.errors import TranscriptError
from tests import strategies


def call(*call_ids: str) -> AssistantMessage:
    return AssistantMessage([ToolCallPart(call_id, "t") for call_id in call_ids])


def result(call_id: str, text: str = "ok") -> ToolMessage:
    return ToolMessage(call_id, "t", text)


def step(*call_ids: str) -> list[Any]:
    return [call(*call_ids), *map(result, call_ids)]


def chain(value: str, message: Any) -> str:
    return f"{value}/{message.role}:{message.text}"


text = UserMessage("text")


# --- against a model ------------------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """
    Versions that grow, fork and are resolved in any order, each beside the plain list that it must equal for ever.
    """

    versions = Bundle("versions")

    @initialize(target=versions)
    def start(self) -> tuple[Transcript, list[Any]]:
        self.kept: list[tuple[Transcript, list[Any], int]] = []
        self.memoised: Counter[int] = Counter()
        self.count = 0
        return self.keep(Transcript(), [])

    def keep(self, transcript: Transcript, model: list[Any]) -> tuple[Transcript, list[Any]]:
        self.kept.append((transcript, model, hash(transcript)))
        return transcript, model

    def fresh(self) -> str:
        self.count += 1
        return f"c{self.count}"

    def measured(self, message: Any) -> int:
        self.memoised[id(message)] += 1
        return len(message.text)

    @rule(target=versions, version=versions, message=strategies.user_messages)
    def append(self, version: Any, message: Any) -> Any:
        transcript, model = version
        message = UserMessage(message.content, message.tags)
        return self.keep(transcript.append(message), [*model, message])

    @rule(target=versions, version=versions, size=st.integers(0, 3), as_transcript=st.booleans())
    def extend_by_a_step(self, version: Any, size: int, as_transcript: bool) -> Any:
        transcript, model = version
        added = step(*[self.fresh() for _ in range(size)])
        return self.keep(transcript.extend(Transcript(added) if as_transcript else iter(added)), [*model, *added])

    @rule(target=versions, version=versions, data=st.data())
    def resolve(self, version: Any, data: st.DataObject) -> Any:
        transcript, model = version
        calls = [i for i, m in enumerate(model) if isinstance(m, ToolMessage)]
        if not calls:
            assert transcript.replace_results({}) is transcript
            return multiple()
        index = data.draw(st.sampled_from(calls))
        answer = data.draw(strategies.results)
        old = model[index]
        new = ToolMessage(old.tool_call_id, old.tool_name, answer.content, answer.status)
        resolved = transcript.replace_result(old.tool_call_id, answer)
        assert index == resolved.shared_prefix_length(transcript)
        return self.keep(resolved, [*model[:index], new, *model[index + 1 :]])

    @rule(one=versions, other=versions)
    def compare(self, one: Any, other: Any) -> None:
        assert (one[0] == other[0]) is (one[1] == other[1])
        shared = one[0].shared_prefix_length(other[0])
        assert shared == other[0].shared_prefix_length(one[0])
        assert one[1][:shared] == other[1][:shared]
        assert len(one[1]) == one[0].shared_prefix_length(one[0])

    @rule(version=versions)
    def memo(self, version: Any) -> None:
        transcript, model = version
        assert [len(m.text) for m in model] == list(transcript.memo(self, self.measured))

    @rule(version=versions)
    def fold(self, version: Any) -> None:
        transcript, model = version
        assert reduce(chain, model, "start") == transcript.fold("chain", chain, "start")

    @rule(version=versions)
    def read(self, version: Any) -> None:
        transcript, model = version
        assert model[::-1] == list(reversed(transcript))
        assert tuple(model[1:-1:2]) == transcript[1:-1:2]
        assert model == [transcript[i] for i in range(len(model))]
        assert model == [transcript[i - len(model)] for i in range(len(model))]
        assert all(transcript.has_call(m.tool_call_id) for m in model if isinstance(m, ToolMessage))

    @invariant()
    def no_version_ever_changes(self) -> None:
        for transcript, model, hashed in getattr(self, "kept", ()):
            assert len(model) == len(transcript)
            assert model == list(transcript)
            assert hashed == hash(transcript)

    @invariant()
    def nothing_is_memoised_twice(self) -> None:
        assert all(count == 1 for count in getattr(self, "memoised", Counter()).values())


TestHistories = pytest.mark.spec("reliability:I5", "requirements:B1")(Histories.TestCase)
TestHistories.settings = settings(max_examples=40, stateful_step_count=20)


# --- appending ------------------------------------------------------------------------------------------------------


def test_versions_share_the_messages_of_their_common_past() -> None:
    first = UserMessage("hi")
    versions = [Transcript([first])]
    held = sys.getrefcount(first)
    for n in range(500):
        versions.append(versions[-1].extend(step(f"c{n}")))

    assert held == sys.getrefcount(first), "an append copies nothing"
    assert 1001 == len(versions[-1])
    branch = versions[0].append(UserMessage("other"))
    assert held + 1 == sys.getrefcount(first), "a branch copies its own messages once"
    assert [first, UserMessage("other")] == list(branch)


@pytest.mark.spec("reliability:RS02")
def test_empty_transcript_keeps_no_reference_to_its_extensions() -> None:
    """
    A module may have one as a constant, which lives as long as the process.
    """
    empty, first = Transcript(), UserMessage("Hello.")
    alone = sys.getrefcount(first)
    conversation = empty.extend([first])
    assert sys.getrefcount(first) > alone

    del conversation

    assert alone == sys.getrefcount(first)


def test_threads_that_append_to_one_version_get_distinct_versions() -> None:
    base = Transcript([UserMessage("base")])
    made: list[tuple[int, Transcript]] = []
    ready = threading.Barrier(8)

    def work(worker: int) -> None:
        ready.wait()
        for turn in range(50):
            version = base
            for n in range(3):
                version = version.extend(step(f"c{worker}_{turn}_{n}"))
                version.fold("chain", chain, "")
            made.append((worker, version))

    threads = [threading.Thread(target=work, args=[worker]) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 400 == len(made)
    for worker, version in made:
        ids = [m.tool_call_id for m in version if isinstance(m, ToolMessage)]
        assert 1 == len({i.rsplit("_", 1)[0] for i in ids})
        assert all(i.startswith(f"c{worker}_") for i in ids)
        assert reduce(chain, list(version), "") == version.fold("chain", chain, "")
    assert [UserMessage("base")] == list(base)


# --- pairing --------------------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[list[Any], str]] = {
    "call without result": ([call("c1")], "the calls ['c1'] have no result"),
    "one of two results": ([call("c1", "c2"), result("c1")], "the calls ['c2'] have no result"),
    "result without call": ([result("c1")], "has no call before it"),
    "result twice": ([*step("c1"), result("c1")], "has no call before it"),
    "results reordered": (
        [call("c1", "c2"), result("c2"), result("c1")],
        "expected the result of 'c1', not the result of 'c2'",
    ),
    "text between": ([call("c1"), text, result("c1")], "the calls ['c1'] have no result right after"),
    "two calls before results": ([call("c1"), call("c2"), result("c1"), result("c2")], "['c1'] have no result"),
    "id twice in a message": ([call("c1", "c1"), result("c1"), result("c1")], "the call id 'c1' is used twice"),
    "id twice": ([*step("c1"), text, *step("c1")], "the call id 'c1' is used twice"),
    "no id": ([call(""), result("")], "the call of 't' has no id"),
    "no message": (["text"], "not a str"),
}


@pytest.mark.spec("requirements:B16", "reliability:I1")
@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_history_that_does_not_pair_is_refused(case: str) -> None:
    messages, reason = BROKEN[case]
    old = Transcript([text])
    newer = old.extend(step("c9"))

    for make in (Transcript, old.extend, newer.extend):
        with pytest.raises(TranscriptError) as caught:
            make(messages)

        assert reason in caught.value.message
    assert [text] == list(old)
    assert [text, *step("c9")] == list(newer)
    assert [text, *step("c9", "c10")] == list(old.extend(step("c9", "c10")))


@pytest.mark.spec("requirements:B16", "reliability:I1")
def test_a_refused_step_leaves_the_transcript_as_it_was() -> None:
    transcript = Transcript(step("c1"))
    for wrong in (step("c1"), [call("c2")], [result("c1")]):
        with pytest.raises(TranscriptError):
            transcript.extend(wrong)
    with pytest.raises(TranscriptError, match="have no result"):
        transcript.append(call("c2"))

    assert [*step("c1"), *step("c2")] == list(transcript.extend(step("c2")))


def test_the_same_id_may_be_used_again_on_another_branch() -> None:
    base = Transcript([text])
    left, right = base.extend(step("c1")), base.extend(step("c1"))

    assert left == right
    assert left.has_call("c1")
    assert not base.has_call("c1")
    assert not base.extend(step("c2")).has_call("c1")


def test_only_the_result_of_a_known_call_can_be_replaced() -> None:
    old = Transcript([text])
    newer = old.extend(step("c1"))

    with pytest.raises(TranscriptError, match="there is no call 'c1'"):
        old.replace_result("c1", ToolResult("new"))
    assert "new" == newer.replace_result("c1", ToolResult("new", status="error"))[2].text
    assert "ok" == newer[2].text


# --- derived values -------------------------------------------------------------------------------------------------


def test_memo_of_a_version_does_not_grow_with_later_versions() -> None:
    old = Transcript([UserMessage("a"), UserMessage("bb")])
    sizes = old.memo("size", lambda message: len(message.text))
    old.append(UserMessage("ccc")).memo("size", lambda message: len(message.text))

    assert 2 == len(sizes)
    assert [1, 2] == list(sizes) == sizes[:] == sizes[0:9]
    assert (2, 1) == (sizes[-1], sizes[-2])
    assert 2 in sizes
    with pytest.raises(IndexError):
        sizes[2]
    with pytest.raises(TypeError):
        sizes[0] = 5  # type: ignore[index]


def test_a_message_looks_the_same_with_and_without_a_memo() -> None:
    message = UserMessage("hi")
    before = repr(message)
    Transcript([message]).memo("size", lambda each: len(each.text))

    assert before == repr(message)


def test_a_memo_that_fails_is_not_kept() -> None:
    transcript = Transcript([UserMessage("a")])

    with pytest.raises(ZeroDivisionError):
        transcript.memo("size", lambda message: 1 // 0)

    assert [1] == list(transcript.memo("size", lambda message: 1))


def test_fold_resumes_from_an_earlier_version() -> None:
    calls: list[str] = []

    def count(value: int, message: Any) -> int:
        calls.append(message.text)
        return value + 1

    version = Transcript([UserMessage("a"), UserMessage("b")])
    assert 2 == version.fold("count", count, 0)
    branch = version.append(UserMessage("c"))
    other = version.append(UserMessage("d"))

    assert (3, 3, 2) == (branch.fold("count", count, 0), other.fold("count", count, 0), version.fold("count", count, 0))
    assert ["a", "b", "c", "d"] == calls


def test_deep_forks_still_know_their_nearest_ancestors() -> None:
    versions = [Transcript([UserMessage(str(n)) for n in range(20)])]
    for n in range(20):
        last = versions[-1]
        last.append(UserMessage("elsewhere"))
        versions.append(last.append(UserMessage(f"fork {n}")))

    assert 39 == versions[-1].shared_prefix_length(versions[-2])
    assert all(versions[-1].shared_prefix_length(v) in (0, len(v)) for v in versions)


def test_transcript_behaves_as_an_immutable_sequence() -> None:
    transcript = Transcript([text, *step("c1")])

    assert "<Transcript of 3 messages>" == repr(transcript)
    assert text in transcript
    assert 1 == transcript.index(call("c1"))
    assert transcript != [text, *step("c1")]
    assert {transcript: 1} == {Transcript([text, *step("c1")]): 1}
    assert transcript.extend(()) is transcript is copy.copy(transcript) is copy.deepcopy(transcript)
    assert {Transcript(): 1} == {Transcript(): 1}
    for index in (3, -4):
        with pytest.raises(IndexError, match="in a transcript of 3"):
            transcript[index]
    rebuilt, arguments = transcript.__reduce__()
    assert transcript == rebuilt(*arguments)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["extend", "resolve", "append"])), max_size=25))
def test_every_version_knows_its_own_calls_and_no_others(actions: list[tuple[int, str]]) -> None:
    """
    However versions were made of one another: appended to, forked from an old one, with results replaced.
    """
    versions = [Transcript([UserMessage("go")])]
    for number, (back, action) in enumerate(actions):
        base = versions[-1 - back % len(versions)]
        ids = [m.tool_call_id for m in base if isinstance(m, ToolMessage)]
        if action == "extend":
            versions.append(base.extend(step(f"n{number}")))
        elif action == "append":
            versions.append(base.append(UserMessage("more")))
        elif ids:
            versions.append(base.replace_result(ids[back % len(ids)], ToolResult.text("gone")))

    every = {m.tool_call_id for version in versions for m in version if isinstance(m, ToolMessage)}
    for version in versions:
        own = {m.tool_call_id for m in version if isinstance(m, ToolMessage)}
        assert own == {call_id for call_id in every if version.has_call(call_id)}
        replaced = version.replace_results(dict.fromkeys(own, ToolResult.text("x")))
        assert ["x" if isinstance(m, ToolMessage) else m.text for m in version] == [m.text for m in replaced]


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abcd"), max_size=8), st.integers(0, 8))
def test_find_missing_returns_each_missing_message_in_order(before: list[str], after: list[str], shared: int) -> None:
    whole = Transcript([UserMessage(word) for word in before])
    for shorter, words in (
        (Transcript([UserMessage(word) for word in after]), after),
        (Transcript(whole[:shared]).extend([UserMessage(word) for word in after]), [*before[:shared], *after]),
        (whole.extend([UserMessage(word) for word in after]), [*before, *after]),
    ):
        left = [message.text for message in whole.find_missing_messages(shorter)]

        assert Counter(before) - Counter(words) == Counter(left)
        assert set(left) <= set(before)
        places = iter(before)
        assert all(word in places for word in left), "they stand in their order"
