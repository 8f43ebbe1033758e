"""
Our side of "drift": a cassette refuses a request whose prompt has changed.
"""

from pathlib import Path

import httpx2

from stepengine.testing import Cassette, CassetteMiss, ReplayTransport

Path("recorded.yaml").write_text("""version: 1
interactions:
- request:
    method: POST
    uri: https://api.example.test/v1/messages
    headers: {content-type: [application/json]}
    body: '{"prompt": "Answer in English."}'
  response:
    status: {code: 200, message: OK}
    headers: {content-type: [application/json]}
    body: {string: '{"text": "Good morning."}'}
""")

with httpx2.Client(transport=ReplayTransport(Cassette.load("recorded.yaml"))) as client:
    try:
        client.post("https://api.example.test/v1/messages", json={"prompt": "Answer in French."})
    except CassetteMiss as miss:
        print(next(line for line in str(miss).splitlines() if "English" in line))
