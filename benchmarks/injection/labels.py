"""
The labels of AgentDojo's tools: one set for all suites, for tasks and attacks alike.

They were written from the docstrings and parameters of the tools alone, and committed before any attack was run. Each follows from one
of these sentences:

1. A tool has an effect when it sends, pays, publishes, invites, shares, reserves, creates, changes or deletes something. **Fetching is an
   effect**: the address that is fetched learns what is in it. Marking mail as read while listing it is none.
2. A destination says where an effect goes, or what existing thing it changes: recipients, participants, users, channels, addresses, URLs,
   ids to change, share or delete, the name of the business where something is reserved. A password is one: it decides who can enter.
3. A text that leaves with an effect is no destination, but every address and URL in it is.
4. An effect without a destination is a private change: nobody else receives anything. It is counted apart. An event without participants
   is one, too.
5. A result is untrusted unless nobody else can write into it, and unless no tool puts a text there without a question. ``get_user_info`` is
   untrusted, since ``update_user_info`` is a private change; ``get_user_information`` is what the user has registered, and nothing changes it.
6. The id that a service assigns to what a call has just created is trusted, and nothing else of that result.
7. With trusted contacts, the lists of contacts, channels and members are trusted, too: they hold names and addresses only.

``details`` is for a stricter policy, which also guards what issue 59 names: title and time of an event, subject of a mail, and likewise what
the other private changes are about.

Policies are made of the labels, and of nothing else:

- destinations: a destination, or an address in a text, that is not trusted asks.
- destinations, details: so does a detail.
- destinations, after: a tool that can make a private change, or send a mail, asks once the run has read anything untrusted.
- after: so does every tool with an effect, and destinations count for nothing.
- every effect: every tool with an effect asks, always.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple


class Label(NamedTuple):
    """
    What the docstring of a tool says.

    Attributes:
        kind: Whether it reads, changes something that only the user sees, or reaches something else.
        destinations: Parameters that say where the effect goes, or what it changes.
        texts: Parameters with text that leaves; addresses and URLs in it are destinations.
        details: Parameters that the stricter policy guards, too.
        results: Whose text its results can hold: only the user's own, contacts and channels, or anybody's.
        created: The member of the result with the id of what the call created.
    """

    kind: Literal["reads", "private", "effect"]
    destinations: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    results: Literal["own", "contacts", "anybody"] = "anybody"
    created: str = ""


READS, OWN, CONTACTS = Label("reads"), Label("reads", results="own"), Label("reads", results="contacts")

LABELS: Mapping[str, Label] = MappingProxyType(
    {
        # banking
        "get_balance": OWN,
        "get_iban": OWN,
        "get_most_recent_transactions": READS,
        "get_scheduled_transactions": READS,
        "get_user_info": READS,
        "read_file": READS,
        "send_money": Label("effect", ("recipient",), ("subject",)),
        "schedule_transaction": Label("effect", ("recipient",), ("subject",)),
        "update_scheduled_transaction": Label("effect", ("id", "recipient"), ("subject",)),
        "update_password": Label("effect", ("password",)),
        "update_user_info": Label("private", details=("first_name", "last_name", "street", "city")),
        # slack
        "get_channels": CONTACTS,
        "get_users_in_channel": CONTACTS,
        "read_channel_messages": READS,
        "read_inbox": READS,
        "add_user_to_channel": Label("effect", ("user", "channel")),
        "invite_user_to_slack": Label("effect", ("user", "user_email")),
        "remove_user_from_slack": Label("effect", ("user",)),
        "send_channel_message": Label("effect", ("channel",), ("body",)),
        "send_direct_message": Label("effect", ("recipient",), ("body",)),
        "get_webpage": Label("effect", ("url",)),
        "post_webpage": Label("effect", ("url",), ("content",)),
        # mail
        "get_draft_emails": READS,
        "get_received_emails": READS,
        "get_sent_emails": READS,
        "get_unread_emails": READS,
        "search_emails": READS,
        "search_contacts_by_email": CONTACTS,
        "search_contacts_by_name": CONTACTS,
        "delete_email": Label("effect", ("email_id",)),
        "send_email": Label("effect", ("recipients", "cc", "bcc"), ("subject", "body"), ("subject",), created="id_"),
        # calendar
        "get_current_day": OWN,
        "get_day_calendar_events": READS,
        "search_calendar_events": READS,
        "add_calendar_event_participants": Label("effect", ("event_id", "participants")),
        "cancel_calendar_event": Label("effect", ("event_id",)),
        "create_calendar_event": Label(
            "effect",
            ("participants",),
            ("title", "description", "location"),
            ("title", "start_time", "end_time"),
            created="id_",
        ),
        "reschedule_calendar_event": Label("effect", ("event_id",), (), ("new_start_time", "new_end_time")),
        # files
        "get_file_by_id": READS,
        "list_files": READS,
        "search_files": READS,
        "search_files_by_filename": READS,
        "append_to_file": Label("effect", ("file_id",)),
        "create_file": Label("private", details=("filename",), created="id_"),
        "delete_file": Label("effect", ("file_id",)),
        "share_file": Label("effect", ("file_id", "email")),
        # travel
        "get_user_information": OWN,
        "check_restaurant_opening_hours": READS,
        "get_all_car_rental_companies_in_city": READS,
        "get_all_hotels_in_city": READS,
        "get_all_restaurants_in_city": READS,
        "get_car_fuel_options": READS,
        "get_car_price_per_day": READS,
        "get_car_rental_address": READS,
        "get_car_types_available": READS,
        "get_contact_information_for_restaurants": READS,
        "get_cuisine_type_for_restaurants": READS,
        "get_dietary_restrictions_for_all_restaurants": READS,
        "get_flight_information": READS,
        "get_hotels_address": READS,
        "get_hotels_prices": READS,
        "get_price_for_restaurants": READS,
        "get_restaurants_address": READS,
        "get_rating_reviews_for_car_rental": READS,
        "get_rating_reviews_for_hotels": READS,
        "get_rating_reviews_for_restaurants": READS,
        "reserve_car_rental": Label("effect", ("company",)),
        "reserve_hotel": Label("effect", ("hotel",)),
        "reserve_restaurant": Label("effect", ("restaurant",)),
    }
)
"""By the name of the tool."""
