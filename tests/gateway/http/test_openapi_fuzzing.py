"""The gateway answers generated requests, valid and invalid ones, as its description says, and never with a failure."""

import asyncio
import sys

import pytest
from support.gateway.fake_nodes import running

from gateway.workers.control_plane import ControlPlane

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "ignored_auth",
)  # fmt: skip
MAX_EXAMPLES = 8
KEY = "fuzzing-key"
# A body without a prompt is refused before its other fields are looked at; most generated ones would be.
HOOKS = """
import schemathesis

PROMPTS = {"/generate": ("text", "input_ids"), "/tokenize": ("prompt", "text", "messages")}


@schemathesis.hook
def before_call(context, case, kwargs):
    names = PROMPTS.get(case.path, ())
    if names and isinstance(case.body, dict) and all(case.body.get(name) is None for name in names):
        case.body = {**case.body, names[0]: "Hello"}
"""
# A generated request may have a deadline of a millisecond, which the gateway answers with 504.
CONFIG = """
hooks = "hooks.py"
continue-on-failure = true

[[operations]]
include-tag = "generate"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "504"]

[[operations]]  # the nodes of this test do not answer these
include-path = ["/v1/workers/{name}/drain", "/v1/workers/{name}/role"]
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "504"]
"""


@pytest.mark.slow
async def test_every_operation_answers_generated_requests_as_described(folder, tmp_path, monkeypatch):
    drain = ControlPlane.drain  # waits in vain for the nodes of this test
    monkeypatch.setattr(ControlPlane, "drain", lambda control, node, timeout_s, _: drain(control, node, timeout_s, 0.1))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    (tmp_path / "hooks.py").write_text(HOOKS)
    async with running(folder, api_key=KEY, enable_priority_scheduling=True, tool_call_parser="hermes") as stack:
        await stack.pair()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "schemathesis.cli", "run", f"{stack.url}/openapi.json",
            "--header", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS),
            "--phases", "coverage,fuzzing", "--max-examples", str(MAX_EXAMPLES), "--seed", "1", "--no-shrink",
            "--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off",
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        assert await stack.get("/health") == (200, {"status": "ok"})
