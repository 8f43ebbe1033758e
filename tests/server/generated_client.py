"""
What a user of the generated client writes: it starts a run, watches it, answers what it asks, and prints what it saw.

Run in the environment of the generator, with the client below the working folder: ``generated_client.py URL TOKEN``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from made import AuthenticatedClient
from made.api.default import answer_run, download_journal, list_agents, look_at_run, start_run, watch_run
from made.models import AnswerQuestions, AnswerQuestionsAnswers, Problem, StartRun

SECONDS = 50.0


def main(url: str, token: str) -> dict[str, Any]:
    client = AuthenticatedClient(url, token, raise_on_unexpected_status=True, timeout=SECONDS)
    agents = [agent.id for agent in list_agents.sync(client=client).agents]
    run = start_run.sync(client=client, body=StartRun(agent="asker", prompt="Rome")).run_id
    shown: list[str] = []
    watcher = threading.Thread(target=lambda: shown.append(watch_run.sync(run, client=client)))
    watcher.start()
    question = asked(client, run)
    answers = AnswerQuestionsAnswers.from_dict({question.id: "Monday"})
    answer_run.sync(run, client=client, body=AnswerQuestions(answers=answers))
    watcher.join(SECONDS)
    stands = look_at_run.sync(run, client=client)
    missing = look_at_run.sync("nothing", client=client)
    assert isinstance(missing, Problem)
    return {
        "agents": agents,
        "question": question.text,
        "events": [line.removeprefix("event: ") for line in shown[0].splitlines() if line.startswith("event: ")],
        "status": stands.status,
        "output": stands.output,
        "journal": json.loads(download_journal.sync(run, client=client).splitlines()[0])["kind"],
        "missing": [missing.status, missing.type_],
    }


def asked(client: AuthenticatedClient, run: str) -> Any:
    """
    Wait until the run asks something; the test that starts this program ends it if that never happens.
    """
    while not (questions := look_at_run.sync(run, client=client).questions):
        time.sleep(0.05)
    return questions[0]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
