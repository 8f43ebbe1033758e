"""
Parts of messages that tests in several files assert. Change them here when the message changes.
"""

FROM_RESULT = "from the result of"
NOT_A_DATABASE = "not a database of stepengine"
NOT_EXECUTED = "could not be executed"
NO_AGENT = "no agent has the id"
NO_KEY = "no API key for"
NO_OPTION = "not one of its options"
OUTCOME_UNKNOWN = "outcome is unknown"
OUTSIDE_ROOT = "outside of the root"
UNAVAILABLE = "is not available for agent"
