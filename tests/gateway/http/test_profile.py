"""``/start_profile`` and ``/stop_profile`` ask every node, and never take a path."""

import pytest
from support.gateway.fake_nodes import running

from common.wire.messages import ProfileAnswer, StartProfile
from gateway.http.routes import profile


async def test_every_node_is_asked_with_the_options_of_the_body(stack):
    body = {"num_steps": 7, "activities": ["CPU"], "with_stack": True, "record_shapes": True}
    status, answer = await stack.post("/start_profile", body)
    assert status == 200
    assert answer == {
        "nodes": [
            {"name": name, "role": name, "model": "tiny", "file": f"/traces/{name}.trace.json.gz", "num_steps": 0,
             "error": ""}
            for name in ("prefill", "decode")
        ]
    }  # fmt: skip
    for node in stack.nodes:
        (message,) = [message for message in node.received if isinstance(message, StartProfile)]
        assert (message.num_steps, message.activities, message.with_stack, message.record_shapes) == (
            7, ("CPU",), True, True,
        )  # fmt: skip


async def test_no_body_is_needed(stack):
    for path in ("/start_profile", "/stop_profile"):
        async with stack.client.post(stack.url + path) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"output_dir": "/etc"}, "output_dir"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 100_000}, "num_steps"),
        ({"activities": ["RPD"]}, "activities"),
        ({"profile_by_stage": True}, "profile_by_stage"),
    ],
)
async def test_a_path_and_other_values_are_refused_by_name(stack, body, field):
    status, answer = await stack.post("/start_profile", body)
    assert status == 400
    assert field in answer["error"]["message"]
    assert not any(isinstance(message, StartProfile) for node in stack.nodes for message in node.received)


async def test_the_error_of_one_node_stands_beside_the_file_of_the_other(stack):
    stack.nodes[0].profile = ProfileAnswer(error="full")
    status, answer = await stack.post("/stop_profile", b"")
    assert status == 200
    assert [(node["error"], bool(node["file"])) for node in answer["nodes"]] == [("full", False), ("", True)]


async def test_if_every_node_refuses_the_answer_is_an_error_that_names_them(stack):
    for node in stack.nodes:
        node.profile = ProfileAnswer(error="profiling is off")
    status, answer = await stack.post("/start_profile", b"{}")
    assert status == 400
    assert answer["error"]["message"] == "decode: profiling is off; prefill: profiling is off"


async def test_nodes_that_do_not_answer_are_named(stack, monkeypatch):
    monkeypatch.setattr(profile, "STOP_TIMEOUT_S", 0.1)
    for node in stack.nodes:
        node.profile = None
    status, answer = await stack.post("/stop_profile", b"")
    assert status == 504
    assert "decode: the node did not answer within 0.1 s" in answer["error"]["message"]


async def test_without_nodes_there_is_nothing_to_profile(folder):
    async with running(folder) as stack:
        assert (await stack.post("/start_profile", b"{}"))[0] == 503
