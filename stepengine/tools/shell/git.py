"""
What keeps git from running programs that a repository's own configuration names (reliability PM14).

Every command gets the few settings whose names are known. Filters and diff drivers have names of their own, so before a
git command that only looks its configuration is read, which runs nothing, and each of those settings is overridden by
name. Commands that change something keep the repository's filters: a file added without its filter would be stored
unencrypted, or whole instead of in a large-file store. Whoever lets them run lets these programs run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from stepengine.errors import ToolError
from stepengine.tools.argv import Argv

__all__ = ("ALWAYS", "NAMES_BYTES", "READ_SECONDS", "Look", "as_variables", "looking")

READ_SECONDS = 10.0
"""How long reading the configuration may take."""
NAMES_BYTES = 4 * 1024 * 1024
"""How many bytes of names a configuration may have; thousands of branches stay far below."""
FOUND_COUNT = 1_000
FOUND_BYTES = 65_536

ALWAYS: Mapping[str, str] = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "core.pager": "cat"}
LOOKING: Mapping[str, str] = {
    # Work in a submodule is work under a configuration that was not read.
    "diff.submodule": "short",
    "status.submoduleSummary": "false",
    # A merge that is made again runs merge drivers.
    "log.diffMerges": "separate",
    "log.showSignature": "false",
    # `%G?` in a format checks signatures, with these programs, which are git's own defaults.
    "gpg.program": "gpg",
    "gpg.openpgp.program": "gpg",
    "gpg.x509.program": "gpgsm",
    "gpg.ssh.program": "ssh-keygen",
}
NO_FETCH = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
"""A partial clone fetches what it lacks, with the programs of its remotes; the second is for a git that lacks the first."""

FAMILIES = {
    ("filter", "clean"): ("clean", ""),
    ("filter", "smudge"): ("smudge", ""),
    ("filter", "process"): ("process", ""),
    ("filter", "required"): ("required", "false"),
    ("hook", "command"): ("enabled", "false"),
}
"""Which setting of a section with a name is overridden when one is found, and what with."""

NO_DRIVERS = ("--no-ext-diff", "--no-textconv")
NO_SUBMODULES = ("--ignore-submodules=dirty",)
ADDED: Mapping[str, Argv] = {
    "status": NO_SUBMODULES,
    "diff": NO_DRIVERS + NO_SUBMODULES,
    "diff-files": NO_DRIVERS + NO_SUBMODULES,
    "diff-index": NO_DRIVERS + NO_SUBMODULES,
    "diff-tree": NO_DRIVERS,
    "log": NO_DRIVERS,
    "show": NO_DRIVERS,
    "blame": ("--no-textconv",),
    "branch": (),
    "grep": (),
    "ls-files": (),
}
"""The commands that only look, each with the options that stand in front of those that were given."""
VALUED = frozenset(("-C", "-c", "--attr-source", "--config-env", "--git-dir", "--namespace", "--work-tree"))


@attrs.frozen
class Look:
    """
    A git command that only looks.

    Attributes:
        argv: What is executed.
        question: What is asked before: the names of all settings that hold for it, each ended by a NUL.
    """

    argv: Argv
    question: Argv

    def variables(self, names: bytes) -> dict[str, str]:
        """
        Return the variables for it, given the answer to the question.

        Raises:
            ToolError: when more than 1,000 settings, or 64 KiB of their names, would have to be overridden.
        """
        found = _overridden(names)
        if len(found) > FOUND_COUNT or sum([len(name) for name in found]) > FOUND_BYTES:
            msg = (
                f"{self.argv[0]!r} was not executed: the repository's configuration names {len(found):,} programs that it "
                f"may run; at most {FOUND_COUNT:,}, with names of {FOUND_BYTES:,} characters together, can be kept from it"
            )
            raise ToolError(msg)
        return as_variables({**ALWAYS, **LOOKING, **found}) | NO_FETCH


def looking(argv: Argv) -> Look | None:
    """Return the git command that only looks, which *argv* is; ``None`` for any other command."""
    if argv[0].rpartition("/")[2] != "git":
        return None
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        at += 2 if argv[at] in VALUED else 1
    if at >= len(argv) or argv[at] not in ADDED:
        return None
    after = at + 1
    question = ("git", *argv[1:at], "config", "--list", "--includes", "--name-only", "-z")
    return Look((*argv[:after], *ADDED[argv[at]], *argv[after:]), question)


def as_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that override *settings*, whatever the files of a configuration say."""
    made = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        made |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return made


def _overridden(names: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in os.fsdecode(names).split("\0"):
        section, _, rest = name.partition(".")
        own, dot, variable = rest.rpartition(".")
        family = FAMILIES.get((section, variable))
        if dot and family is not None:
            found[f"{section}.{own}.{family[0]}"] = family[1]
    return found
