"""The modules that one request passes through on its way from the socket to the nodes."""

import sys

import pytest
from support.gateway.fake_nodes import running

from common.wire.messages import Generate
from gateway.http.generate import GenerateApp
from gateway.workers.control_plane import MailboxChannel

MAX_MODULES = 15
HI = [{"role": "user", "content": "Hi"}]


def modules_entered(frames):
    """Modules in the order in which calls from other modules enter them; consecutive calls count once."""
    entered = []
    for caller, callee in frames:
        if caller != callee and entered[-1:] != [callee]:
            entered.append(callee)
    return entered


def recorder(calls, seen):
    """A profiling function that records calls into modules of the gateway."""

    def record(frame, event, arg):
        module = frame.f_globals.get("__name__", "")
        is_generated = frame.f_code.co_filename.startswith("<")  # such as the constructor of a dataclass
        if event != "call" or not module.startswith("gateway.") or is_generated or frame in seen:
            return
        seen.add(frame)  # a resumed coroutine is no new call
        caller = frame.f_back.f_globals.get("__name__", "") if frame.f_back else ""
        if not calls or caller.startswith("gateway."):  # the event loop also calls on behalf of others
            calls.append((caller, module))

    return record


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1, "stop": "x"}),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}),
    ],
)
async def test_a_request_enters_few_modules_and_none_twice_before_it_is_sent(folder, monkeypatch, path, body):
    calls, sent = [], []
    async with running(folder) as stack:
        await stack.pair()
        send = MailboxChannel.send

        def stop_recording(channel, message, *incarnations):
            if isinstance(message, Generate) and not sent:
                sys.setprofile(None)
                sent.extend(modules_entered(calls))
            return send(channel, message, *incarnations)

        answer = GenerateApp.__call__

        async def start_recording(*request):
            sys.setprofile(recorder(calls, set()))
            await answer(*request)

        monkeypatch.setattr(MailboxChannel, "send", stop_recording)
        monkeypatch.setattr(GenerateApp, "__call__", start_recording)
        try:
            assert (await stack.post(path, body))[0] == 200
        finally:
            sys.setprofile(None)
    way = [*sent, MailboxChannel.__module__]
    assert "gateway.http.request_cycle" in way, "which gives the body when the endpoint asks for it"
    assert len(way) == len(set(way)), "\n".join(way)
    assert len(way) <= MAX_MODULES, "\n".join(way)
