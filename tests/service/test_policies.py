"""User-defined policies and priority functions in a real service, on every node and in the gateway."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.service.processes import ROOT, environment
from support.service.service import WORKER, running

MODULE = """
from common.scheduling.policies.base import Policy

class LongestPromptFirst(Policy):
    def order(self, waiting, now):
        return sorted(waiting, key=lambda request: -len(request.prompt))

def deprioritize_long_prompts(facts):
    return -5 if facts.num_prompt_tokens > 45 else 0
"""


def num_requests(heartbeat: dict[str, Any]) -> int:
    found: int = heartbeat["num_waiting"] + heartbeat["num_running"]
    return found


async def test_a_user_defined_policy_orders_requests_on_every_node(tmp_path: Path) -> None:
    (tmp_path / "own_scheduling.py").write_text(MODULE)
    options = {
        "schedule_policy": "own_scheduling:LongestPromptFirst",
        "enable_priority_scheduling": True,
        "default_priority_value": 0,
    }
    with running(
        tmp_path / "logs",
        gateway_options={**options, "priority_function": "own_scheduling:deprioritize_long_prompts"},
        node_options={**options, "max_running_requests": 1},
        variables={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    ) as service:
        async with service.client() as client:
            begun = client.begin(list(range(5, 15)), 3000)
            await begun.has(1)
            lengths = (20, 30, 40, 50)
            others = [client.begin(list(range(100, 100 + length)), 20) for length in lengths]
            while num_requests((await client.heartbeats())["decode-0"]) < 1 + len(others):
                assert not begun.ended_at
            await begun.leave()
            await asyncio.gather(*(exchange.end() for exchange in others))
            by_end = sorted(zip(others, lengths, strict=True), key=lambda pair: pair[0].ended_at)
            # The first request met an empty queue, so its prompt was computed without a comparison.
            later = [length for _, length in by_end[1:]]
            assert later == sorted(later, key=lambda length: (length > 45, -length))


@pytest.mark.parametrize("command", ["gateway", WORKER])
def test_a_policy_that_cannot_be_imported_is_refused(command: str) -> None:
    argv = [sys.executable, "-m", command, "--schedule-policy", "own_nothing:Policy", "--port=0", "--control-port=0"]
    result = subprocess.run(
        argv if command == "gateway" else [*argv[:3], "prefill", *argv[3:5]],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 2, result.stderr
    assert "--schedule-policy own_nothing:Policy cannot be imported: No module named 'own_nothing'" in result.stderr
    assert "Traceback" not in result.stderr
