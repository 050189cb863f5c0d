"""Stream a chat completion from Baton, or from any OpenAI-compatible server, with the standard library alone.

    python docs/examples/streaming_client.py "What news from Verona?" --url http://127.0.0.1:8000

The client does the four things that a careful client does: it reads server-sent events as they arrive, waits as long
as ``Retry-After`` says when the server is full, reports errors by the message in OpenAI's envelope, and notices an
error that arrives after the stream has begun.
"""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

MAX_TRIES = 5


class ServerError(Exception):
    """The server answered with an error; the message is the server's own."""


def post(url: str, path: str, body: dict[str, Any], *, key: str = "") -> http.client.HTTPResponse:
    """Send one request; retry after 429 (too many requests) and 503 (no nodes yet), up to ``MAX_TRIES`` times."""
    address = urlsplit(url)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    for number in range(MAX_TRIES):
        connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port or 80, timeout=600)
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        text = response.read()
        if response.status not in (429, 503) or number == MAX_TRIES - 1:
            raise ServerError(f"{response.status}: {message_of(text)}")
        time.sleep(float(response.headers.get("Retry-After", 1)))
    raise AssertionError("the loop returns or raises")


def message_of(text: bytes) -> str:
    """The sentence in an error's body, or the body itself if it is not OpenAI's envelope."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.decode(errors="replace")


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to ``data: [DONE]``."""
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(event["error"]["message"])
        yield event
    raise ServerError("the connection closed before the end of the stream")


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream a chat completion.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="", help="API key, if the server asks for one")
    parser.add_argument("--max-tokens", type=int, default=60)
    options = parser.parse_args()
    body = {
        "messages": [{"role": "user", "content": options.prompt}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        for event in events(post(options.url, "/v1/chat/completions", body, key=options.key)):
            for choice in event["choices"]:
                print(choice["delta"].get("content", ""), end="", flush=True)
            if usage := event.get("usage"):
                print(f"\n[{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out]")
    except (ServerError, OSError) as error:
        print(f"streaming_client: {options.url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
