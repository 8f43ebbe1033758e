"""Recorded traffic as our codecs, the SDKs and the bills in the replies read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from stepengine.data.messages import TextPart
from stepengine.data.usage import Usage
from tests.faults.scripts import CHAT
from tests.models.conformance import main
from tests.models.recorded import FOLDER, Recording, needs_recordings


@pytest.mark.spec("providers:PV81")
def test_conformance_reports_a_text_and_a_cost_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, Any] = json.loads(CHAT.reply("It is five.", [], "end_turn"))
    body["usage"] |= {"cost": 0.25, "is_byok": False, "total_tokens": 42}
    uri = "https://openrouter.ai/api/v1/chat/completions"
    headers = {"content-type": ["application/json"]}
    exchange = {
        "request": {"method": "POST", "uri": uri, "body": json.dumps({"model": "m", "messages": []})},
        "response": {"status": {"code": 200}, "headers": headers, "body": {"string": json.dumps(body)}},
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"interactions": [exchange]}))
    right = Recording.decoded

    def wrong(self: Recording) -> Any:
        return attrs.evolve(right(self), content=[TextPart("It is six.")], cost=None, usage=Usage(1_000, 5))

    assert 0 == main(tmp_path)
    assert "1 equal, " in capsys.readouterr().out
    monkeypatch.setattr(Recording, "decoded", wrong)
    assert 1 == main(tmp_path)
    told = capsys.readouterr().out
    assert "different: a.yaml#0: text: ours 'It is six.', the SDK 'It is five.'" in told
    assert "different: a.yaml#0: the service says that it cost 0.25, ours " in told
    assert "different: a.yaml#0: the service counts 42 tokens, ours 1000 + 5" in told
    assert "different: a.yaml#0: prompt: " in told


@pytest.mark.smoke
@needs_recordings
@pytest.mark.deep
@pytest.mark.spec("requirements:G1")
def test_recorded_traffic_agrees_with_the_sdks_and_the_bills(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(FOLDER)
    assert ", 0 different" in capsys.readouterr().out
