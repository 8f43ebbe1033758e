"""
Bodies of providers that were once read wrongly: what came of each, what comes now, the test that holds it.

The letters are those of the points that named them. Each has a planted fault that undoes its mending; ``python -m tests.mutants``
sees that the test notices.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import attrs
import pytest

from tests.mutants import MUTANTS

TESTS = Path(__file__).resolve().parents[1]


@attrs.frozen
class Body:
    """
    A body that was read wrongly.

    Attributes:
        point: What named it.
        held: What it held.
        was: What came of it.
        now: What comes of it.
        file: Where its test stands, below ``tests``.
        test: The test.
        fault: The name of the planted fault that undoes its mending.
    """

    point: str
    held: str
    was: str
    now: str
    file: str
    test: str
    fault: str


BODIES = (
    Body(
        "A1",
        "Gemini: a call whose arguments come as `partialArgs`",
        "a tool that ran with `{}`, and *completed*",
        "one call with all arguments",
        "models/test_streamed_arguments.py",
        "test_a_call_whose_arguments_come_in_pieces_runs_with_all_of_them",
        "pieces of a call of Gemini are calls of their own",
    ),
    Body(
        "A1",
        "Gemini: a text of an argument in several pieces",
        "the last piece alone",
        "the text",
        "models/test_streamed_arguments.py",
        "test_any_arguments_are_the_same_in_pieces_as_at_once",
        "the pieces of a text of an argument take each other's place",
    ),
    Body(
        "A2",
        "Chat: a `custom` call",
        "an empty reply",
        "`unanswerable`, at once and in pieces",
        "models/test_whole_calls.py",
        "test_a_call_of_a_custom_tool_is_refused_as_it_is_on_the_other_wire",
        "a call of a custom tool is a function's",
    ),
    Body(
        "A2",
        "Chat: `function_call`, the form before `tool_calls`",
        "an empty reply, 14 of 14",
        "a call that goes back in its form",
        "models/test_whole_calls.py",
        "test_a_function_call_is_a_call_and_goes_back_in_its_own_form",
        "a call in the form before tool_calls is none",
    ),
    Body(
        "A2",
        "Chat: `extra_content.google.thought_signature`",
        "left out, and the next request a 400",
        "goes back to its model",
        "models/test_whole_calls.py",
        "test_the_signature_of_a_call_behind_googles_openai_endpoint_goes_back_to_the_model_that_made_it",
        "what stands beside a streamed function is lost",
    ),
    Body(
        "A3",
        "Anthropic: `caller`, `toolset_name` of a call",
        "left out",
        "go back to their model",
        "models/test_members_of_the_sdks.py",
        "test_what_a_call_holds_beside_its_arguments_goes_back_to_the_model_that_made_it_alone",
        "what a call of Anthropic's held beside its arguments stays at home",
    ),
    Body(
        "A3",
        "Anthropic: `diagnostics`, and any member of a message that nobody knows",
        "left out",
        "kept",
        "models/test_members_of_the_sdks.py",
        "test_a_member_of_tomorrow_is_kept_wherever_in_a_reply_it_stands",
        "what a message of Anthropic's holds that is newer is lost",
    ),
    Body(
        "A3",
        "Responses: `caller` of a call",
        "left out",
        "goes back to its model",
        "models/test_members_of_the_sdks.py",
        "test_what_a_call_holds_beside_its_arguments_goes_back_to_the_model_that_made_it_alone",
        "what a call of Responses held beside its arguments stays at home",
    ),
    Body(
        "A3",
        "Responses: members of a message and its text",
        "left out",
        "go back to their model",
        "models/test_members_of_the_sdks.py",
        "test_what_texts_and_thoughts_hold_that_is_newer_goes_back_to_the_model_that_made_it_alone",
        "what a message of Responses held stays at home",
    ),
    Body(
        "A3",
        "Chat: a second choice",
        "dropped in silence",
        "told of by name, once",
        "models/test_events_of_streams.py",
        "test_a_second_answer_is_told_of_and_the_first_one_counts",
        "a second choice of a stream is dropped in silence",
    ),
    Body(
        "A3",
        "Responses: an event that nobody knows",
        "dropped in silence",
        "told of by name, once",
        "models/test_events_of_streams.py",
        "test_an_event_of_tomorrow_is_told_of_once_and_changes_nothing",
        "an unknown event of Responses is dropped in silence",
    ),
    Body(
        "A3",
        "Anthropic: an event that nobody knows",
        "dropped in silence",
        "told of by name, once",
        "models/test_events_of_streams.py",
        "test_an_event_of_tomorrow_is_told_of_once_and_changes_nothing",
        "an unknown event of Anthropic is dropped in silence",
    ),
    Body(
        "A3",
        "Chat: a member of a delta that nobody knows",
        "dropped in silence",
        "kept",
        "models/test_events_of_streams.py",
        "test_a_member_of_tomorrow_is_kept_or_told_of_wherever_in_an_event_it_stands",
        "a delta of Chat is read and nothing else of it kept",
    ),
    Body(
        "A3",
        "any of these, in a run",
        "nobody is told",
        "a `Warned` and a warning of the result, once",
        "machine/test_batches.py",
        "test_what_of_a_reply_was_not_read_is_told_once_in_the_result_and_as_an_event",
        "what of a reply was not read is told to nobody",
    ),
    Body(
        "A4",
        "a member of a response that only a newer SDK knows",
        "found by accident",
        "kept, or the walk of the types fails",
        "models/test_members_of_the_sdks.py",
        "test_every_member_that_an_sdk_knows_of_a_reply_is_read_carried_or_named",
        "what tools of OpenAI used is neither read nor kept",
    ),
    Body(
        "B1",
        "xAI: `cost_in_usd_ticks`",
        "$0.00615 for $0.01615",
        "$0.01615",
        "models/test_pricing.py",
        "test_the_bill_that_xai_states_wins_over_any_price_list",
        "the bill of xAI is not read",
    ),
    Body(
        "B1",
        "xAI: searches without a stated bill",
        "free",
        "at their price",
        "models/test_pricing.py",
        "test_tools_of_xai_cost_something_where_no_bill_is_stated",
        "searches of X cost nothing",
    ),
    Body(
        "B1",
        "Perplexity: `cost.total_cost`",
        "the price of the tokens",
        "what it states",
        "models/test_pricing.py",
        "test_the_bill_of_a_service_or_a_gateway_wins_wherever_it_is_stated",
        "the total of a bill in parts is not read",
    ),
    Body(
        "B1",
        "OpenRouter: a key of one's own",
        "what OpenRouter asks",
        "what the provider asks, too",
        "models/test_pricing.py",
        "test_the_bill_of_a_service_or_a_gateway_wins_wherever_it_is_stated",
        "what the user's own key is charged is left out of a bill",
    ),
    Body(
        "B1",
        "LiteLLM: the bill in a header",
        "the price of the tokens",
        "what it states",
        "models/test_pricing.py",
        "test_the_bill_in_a_header_of_litellm_wins_unless_it_is_nothing",
        "the bill in a header is not read",
    ),
    Body(
        "B1",
        "Vercel: the bill beside the message, in a stream",
        "the price of the tokens",
        "what it states",
        "models/test_events_of_streams.py",
        "test_what_a_gateway_says_beside_a_streamed_message_counts",
        "the bill beside a message is not read in streams",
    ),
    Body(
        "B2",
        "Responses: `tool_usage` with tokens of images",
        "unbilled",
        "at the price of their model",
        "models/test_pricing.py",
        "test_searches_and_images_of_openai_are_billed_as_it_counts_them",
        "images that were made beside a reply cost nothing",
    ),
    Body(
        "B2",
        "Responses: `num_requests` of a search",
        "those that the reply shows",
        "those that it counts",
        "models/test_pricing.py",
        "test_searches_and_images_of_openai_are_billed_as_it_counts_them",
        "searches are counted by what a reply shows",
    ),
    Body(
        "B2",
        "`priority`, `ultrafast` without a listed price",
        "the ordinary price",
        "a lower bound that says so",
        "models/test_pricing.py",
        "test_what_has_no_price_makes_a_cost_a_lower_bound_that_says_so",
        "a dearer tier without a price costs as the ordinary one",
    ),
    Body(
        "B2",
        "Gemini: flex",
        "the ordinary price",
        "that of a batch",
        "models/test_pricing.py",
        "test_flex_costs_what_a_batch_does_and_a_tier_that_nobody_knows_is_unknown",
        "flex is a tier that nobody knows",
    ),
    Body(
        "B2",
        "Vertex AI: `trafficType`",
        "the ordinary price",
        "that of its tier",
        "models/test_pricing.py",
        "test_what_has_no_price_makes_a_cost_a_lower_bound_that_says_so",
        "the kind of traffic of Vertex AI is not read",
    ),
    Body(
        "B3",
        "Gemini: `totalTokenCount` 76 and nothing else",
        "0 tokens",
        "76 tokens",
        "models/test_pricing.py",
        "test_what_gemini_states_of_the_whole_alone_is_counted",
        "what Gemini states of the whole alone is nothing",
    ),
    Body(
        "B3",
        "Grok on Azure: 163 cached of a prompt of 7",
        "7 tokens",
        "170, or a lower bound",
        "models/test_pricing.py",
        "test_a_cache_that_is_counted_beside_the_prompt_is_added_where_the_sum_says_so",
        "a cache beside the prompt is clamped",
    ),
    Body(
        "C",
        "Anthropic: a `fallback_message` in `usage.iterations`",
        "0.03464 for 0.00866 dollars",
        "once",
        "models/test_pricing.py",
        "test_a_model_that_stood_in_is_counted_once_and_named",
        "a model that stood in is counted twice",
    ),
    Body(
        "C",
        "Anthropic: `fallback` blocks, in streams too",
        "the model that declined",
        "the last that stood in",
        "models/test_pricing.py",
        "test_a_model_that_stood_in_is_counted_once_and_named",
        "a model that stood in is not named",
    ),
    Body(
        "C",
        "`fallbacks` of a request",
        "no setting",
        "a setting, with its beta",
        "models/test_settings.py",
        "test_models_that_answer_in_place_of_one_that_declines_are_named_to_anthropic_with_its_beta",
        "models that stand in are not asked for",
    ),
    Body(
        "D",
        'Google: 400 "API key not valid"',
        "a bad request",
        "`auth`, with where the key came from",
        "models/test_wrong_keys.py",
        "test_a_key_that_was_refused_is_told_with_where_it_came_from_whatever_the_status",
        "a key that Google refuses is a bad request",
    ),
    Body(
        "D",
        'xAI: 400 "Incorrect API key provided"',
        "a bad request",
        "`auth`, with where the key came from",
        "models/test_wrong_keys.py",
        "test_a_key_that_was_refused_is_told_with_where_it_came_from_whatever_the_status",
        "a key that xAI refuses is a bad request",
    ),
    Body(
        "D",
        "a refused key in `fallback(...)`",
        "the run ended",
        "the next model, by default",
        "models/test_wrong_keys.py",
        "test_a_fallback_goes_on_by_default_where_a_key_was_refused",
        "a fallback stops at a refused key",
    ),
    Body(
        "D",
        "Perplexity: `too_many_prompt_tokens`",
        "a bad request",
        "an overflow",
        "models/test_wrong_keys.py",
        "test_the_word_of_perplexity_for_a_prompt_that_is_too_long_is_an_overflow",
        "the word of Perplexity for a long prompt is unknown",
    ),
    Body(
        "D",
        "Cloudflare: `content` as an object",
        "no reply",
        "its JSON",
        "models/test_streams.py",
        "test_an_answer_by_a_schema_that_comes_as_an_object_is_its_json_and_no_other_object_is_a_text",
        "an answer as an object is not a reply",
    ),
    Body(
        "D",
        "Responses: gaps in `output_index`",
        "a protocol error",
        "read in their order",
        "models/test_streams.py",
        "test_items_whose_numbers_leave_gaps_are_read_in_their_order_and_one_that_comes_again_is_refused",
        "a gap in the numbers of items is an error",
    ),
    Body(
        "E",
        "OpenRouter with Claude: a piece of reasoning that is a signature alone",
        "torn, 3 of 3 streams",
        "of the item before it",
        "models/test_streams.py",
        "test_a_piece_that_is_a_signature_alone_ends_the_reasoning_before_it",
        "a signature that comes alone is an item of its own",
    ),
    Body(
        "E",
        "xAI: its search of X in a stream",
        '"waits for its client"',
        "answered",
        "models/test_pricing.py",
        "test_a_search_of_x_in_a_stream_of_xai_does_not_wait_for_its_client",
        "a search of X waits for its client",
    ),
    Body(
        "E",
        "Perplexity: `citations`, `search_results`",
        "lost, 21 of 21",
        "citations of the reply",
        "models/test_presets.py",
        "test_sources_beside_the_choices_are_citations_of_the_reply",
        "sources beside the choices are lost",
    ),
    Body(
        "I",
        "Gemini 4: `XHIGH`",
        "`high`, and `minimal` and numbers that are a 400",
        "each model's levels",
        "models/test_thinking_words.py",
        "test_every_word_for_how_much_to_think_that_an_sdk_knows_is_sent_to_some_model",
        "no model of Gemini's is asked for its most",
    ),
    Body(
        "I",
        "Gemini: `continuationToken`",
        "cut, and asked for more in words",
        "gone on with",
        "models/test_responses_and_gemini.py",
        "test_a_reply_of_gemini_that_is_longer_than_one_request_gives_is_gone_on_with_by_its_token",
        "a long reply of Gemini's is gone on with without its token",
    ),
    Body(
        "I",
        "Gemini: `imageSearchQueries`",
        "free",
        "a lower bound that says so",
        "models/test_pricing.py",
        "test_what_has_no_price_makes_a_cost_a_lower_bound_that_says_so",
        "searches of images cost nothing",
    ),
    Body(
        "I",
        "Responses: `steered`",
        "an unknown end",
        "what came until then",
        "models/test_responses_and_gemini.py",
        "test_a_response_that_was_steered_elsewhere_is_what_came_until_then",
        "a steered response is refused",
    ),
)


@cache
def named_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: f"{body.point} {body.fault}")
def test_a_body_that_was_wrong_has_a_test_and_a_planted_fault_that_it_is_to_notice(body: Body) -> None:
    planted = [mutant for mutant in MUTANTS if mutant.name == body.fault]

    assert body.test in named_in(body.file)
    assert [(f"tests/{body.file}",)] == [mutant.tests for mutant in planted]


def test_every_point_has_its_bodies() -> None:
    assert set("ABCDEI") == {body.point[0] for body in BODIES}
