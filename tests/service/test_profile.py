"""A profile of a running service has the operations of its model."""

import gzip
import json
from pathlib import Path

from support.service.client import prompt_of
from support.service.service import running


async def test_the_traces_of_a_service_hold_the_steps_of_every_node(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    with running(tmp_path / "logs", node_options={"profile_dir": traces}) as service:
        async with service.client() as client:
            status, started = await client.post("/start_profile", {"activities": ["CPU"]})
            assert status == 200, started
            body = {"prompt": prompt_of(40, 1), "max_tokens": 5, "ignore_eos": True}
            assert (await client.post("/v1/completions", body))[0] == 200
            status, stopped = await client.post("/stop_profile", None)
            assert status == 200, stopped
            await client.settled()
    files = {node["name"]: node["file"] for node in stopped["nodes"]}
    assert files == {node["name"]: node["file"] for node in started["nodes"]}
    assert {node["name"]: node["num_steps"] for node in stopped["nodes"]} == {"prefill-0": 1, "decode-0": 4}
    assert sorted(map(str, traces.iterdir())) == sorted(files.values())
    for file in files.values():
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events)


async def test_without_a_folder_the_profiler_is_refused_with_the_flag(tmp_path: Path) -> None:
    with running(tmp_path / "logs") as service:
        async with service.client() as client:
            status, answer = await client.post("/start_profile", {"output_dir": str(tmp_path)})
            assert status == 400 and "--profile-dir" in answer["error"]["message"]
            status, answer = await client.post("/start_profile", None)
            assert status == 400 and "start it with --profile-dir" in answer["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] in ([], ["logs"])
