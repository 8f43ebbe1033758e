"""``stepengine journal check``: damage, secrets and signatures in journals, and secrets in other files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer
from attrs import frozen

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import iterate_files_and_journals
from stepengine.cli.options import Json
from stepengine.cli.screen.render import one_line, print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.errors import JournalError

if TYPE_CHECKING:
    from stepengine.journal import JournalReport, RecordedDecision, SecretFinding, VerificationResult

SAID_CHARS = 200


def check(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Files and folders; a recorded run, or RUNS.db#RUN in an SQLite file."),
    ],
    *,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Hash of this is not a secret; may be repeated.", metavar="HASH"),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="Verify signatures with this public key, such as audit.pub; may be repeated.", metavar="PUB"),
    ] = None,
    seen: Annotated[
        str,
        typer.Option(
            help="With --key and one journal: the journal must start with the content of this digest.", metavar="DIGEST"
        ),
    ] = "",
    allow_unsigned: Annotated[
        bool,
        typer.Option(
            "--allow-unsigned", help="With --key: report unsigned records, as after a crash, without failing."
        ),
    ] = False,
    as_json: Json = False,
) -> Exit:
    """
    Check journals and files: damage, secrets, signatures.

    Checks every record of a journal: checksums, order, fingerprints, blobs. In files of any kind, finds texts
    shaped like keys (providers, GitHub, Slack, AWS, JWT, PEM), values of environment variables named like secrets
    (API_KEY, TOKEN, PGPASSWORD, ...) and passwords in URLs, in plain text, escaped or in base64. Values are never
    printed. A folder means all files in it.

    --key requires that a journal is signed, unaltered and complete, and lists its answers. Sign a run with
    `stepengine run ... --journal run.jsonl --sign audit`; `ssh-keygen -t ed25519 -f audit` creates the key. Only
    --seen detects a journal that was truncated to an earlier signed end.

    Exits with 1 if anything is found. A run without an end is not an error. Nothing is run or changed.

    Examples:
      stepengine journal check .                        for a commit hook or CI
      stepengine journal check run.jsonl journals/
      stepengine journal check README.md --json         each secret with its hash
      stepengine journal check . --allow sha256:...     this is not a secret
      stepengine journal check run.jsonl --key audit.pub --seen 9f86d081...
    """
    if not key and (seen or allow_unsigned):
        msg = "--seen and --allow-unsigned need --key PUB; add it"
        raise UsageProblem(msg)
    try:
        found = list(_check_journals_and_secrets(paths, allow or (), key or (), seen))
    except JournalError as error:
        return print_error(error.message, Exit.FAILED)
    if seen and sum(one.verified is not None for one in found) != 1:
        msg = "--seen is the digest of one journal; check that journal alone"
        raise UsageProblem(msg)
    is_good = all(one.is_good(allow_unsigned=allow_unsigned) for one in found)
    if as_json:
        print(to_ascii_json([one.to_dict(allow_unsigned=allow_unsigned) for one in found]))
    elif lines := [line for one in found for line in one.format_finding_lines()]:
        print_visible("\n".join(lines), hanging_indent=4)
    if where := sum(bool(one.leaks) for one in found):
        print(f"secrets in {where} files; remove them, and replace keys that were shared", file=sys.stderr)
    return Exit.COMPLETED if is_good else Exit.FAILED


@frozen(kw_only=True)
class _CheckedFile:
    """The findings for one file, with a report if it is a journal."""

    name: str
    report: JournalReport | None = None
    leaks: Sequence[SecretFinding] = ()
    verified: VerificationResult | None = None
    decisions: Sequence[RecordedDecision] = ()

    def is_good(self, *, allow_unsigned: bool) -> bool:
        """Return whether the file has no damage, no secrets and, if it was verified, a valid signature."""
        is_sound = self.report is None or (bool(self.report) and not self.report.secrets)
        is_signed = self.verified is None or (self.verified.is_unaltered and (allow_unsigned or bool(self.verified)))
        return is_sound and not self.leaks and is_signed

    def to_dict(self, *, allow_unsigned: bool) -> dict[str, object]:
        """Return the findings in a file as JSON values."""
        told: dict[str, object] = {"name": self.name} if self.report is None else attrs.asdict(self.report)
        told |= {
            "ok": self.is_good(allow_unsigned=allow_unsigned),
            "leaks": [attrs.asdict(leak) for leak in self.leaks],
        }
        if self.verified is not None:
            signed = self.verified.signed
            answers = [
                {**attrs.asdict(one), "time": one.time.isoformat(), "signed": one.record <= signed}
                for one in self.decisions
            ]
            told |= {"signature": attrs.asdict(self.verified), "decisions": answers}
        return told

    def format_finding_lines(self) -> Iterator[str]:
        """Yield printable lines: the signatures and answers, the state of the journal, and secrets not yet named."""
        if self.verified is not None:
            yield from _format_verification_lines(self.verified)
            yield from [_describe_decision(one, self.verified) for one in self.decisions]
        if self.report is not None:
            yield from _format_report_lines(
                self.report, is_good=not (self.report.problems or self.report.secrets or self.leaks)
            )
        shown = [secret.partition(" /")[0] for secret in self.report.secrets] if self.report is not None else []
        yield from [str(leak) for leak in self.leaks if f"record {leak.line}" not in shown]


def _check_journals_and_secrets(
    paths: Iterable[str], allow: Sequence[str], keys: Sequence[str], start_digest: str
) -> Iterator[_CheckedFile]:
    """Check every file of *paths*; yield journals and files with secrets."""
    from stepengine.journal import check, decisions, scan, verify

    for path in paths:
        for file, journal in iterate_files_and_journals(path):
            leaks = tuple(scan([file], allow_secrets=allow)) if Path(file).is_file() else ()
            if journal is None:
                yield from [_CheckedFile(name=file, leaks=leaks)] if leaks else []
                continue
            verified = verify(journal, keys, seen=start_digest) if keys else None
            yield _CheckedFile(
                name=file,
                report=check(journal, allow_secrets=allow),
                leaks=leaks,
                verified=verified,
                decisions=decisions(journal) if verified is not None and verified.is_unaltered else (),
            )


def _format_report_lines(report: JournalReport, *, is_good: bool) -> Iterator[str]:
    """Yield the lines about a journal: its state, problems and secrets."""
    state = "complete" if report.is_complete else "incomplete: it can be resumed"
    state = "but no run has started: start it again" if report.records == 1 else state
    known = "not usable as it is" if report.problems else f"{report.records} records, {state}"
    yield f"{'ok' if is_good else 'BAD':<4}{report.name}  {known}"
    yield from [f"      {problem}" for problem in report.problems]
    yield from [f"      looks like a secret: {secret}" for secret in report.secrets]
    if report.torn:
        yield f"      {report.torn} bytes at the end are an incomplete record; resume removes them"


def _format_verification_lines(verified: VerificationResult) -> Iterator[str]:
    """Yield the lines about the signatures of a journal."""
    state = "ok" if verified else "ALTERED" if verified.problems else "UNSIGNED"
    yield f"{state:<9}{verified.name}  run {verified.run} of {verified.agent}, {verified.records} records"
    yield from [f"  {problem}" for problem in verified.problems]
    yield from [f"  {told}" for told in verified.unsigned]
    if verified.signatures:
        yield f"  signed up to record {verified.signed}, last at {verified.time}, by {verified.key}"
        yield f"  digest {verified.digest}"


def _describe_decision(decision: RecordedDecision, verified: VerificationResult) -> str:
    """Return a line about a recorded answer of a person, and whether it is signed."""
    who = decision.by or "somebody"
    said = (
        "declined"
        if decision.declined
        else one_line(decision.said, SAID_CHARS) or ("supplied the result" if decision.kind == "result" else "yes")
    )
    more = [
        decision.tool,
        "with changed input" if decision.edited else "",
        f"for the {decision.remembered}" if decision.remembered == "session" else "",
        "permanently" if decision.remembered == "always" else "",
        f"because: {one_line(decision.reason, SAID_CHARS)}" if decision.reason else "",
        "NOT SIGNED" if decision.record > verified.signed else "",
    ]
    about = "; ".join(filter(None, more))
    when = decision.time.isoformat(timespec="seconds")
    return f"  {when}  {decision.address}  {who}: {said}  to {one_line(decision.asked, SAID_CHARS)!r}" + (
        f" ({about})" if about else ""
    )
