"""The wall clock is read only where the clock of another host cannot matter: hosts may differ by minutes."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "gateway", "prefill_node", "decode_node", "kv_transfer")
CLOCKS = {"time", "time_ns", "localtime", "gmtime", "ctime", "now", "utcnow", "today", "CLOCK_REALTIME"}
#: Each module that reads it, and why no other host's clock matters.
READERS = {
    "common/logs.py": "times of log lines",
    "common/node/profiler.py": "the name of a file",
    "gateway/http/access/auth.py": "ends of API keys, by the gateway's clock",
    "gateway/http/generate.py": "`created` and `created_at` of an answer",
    "gateway/http/request_cycle.py": "the header Date",
    "gateway/http/routes/models.py": "`created` of models",
    "gateway/http/routes/traces.py": "places timelines of the gateway's monotonic clock",
    "gateway/text/chat_template.py": "today's date in a prompt",
    "gateway/tracing/otlp.py": "places spans of the gateway's monotonic clock",
    "gateway/workers/adapter_changes.py": "numbers, above all that nodes have told (tests/gateway/http/test_lora.py)",
}


def readings(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS and isinstance(node.value, ast.Name):
            if node.value.id in ("time", "datetime", "date"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (alias.name for alias in node.names if alias.name in CLOCKS)


def test_only_known_modules_read_the_wall_clock() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(readings(ast.parse(path.read_text())))
    }
    assert found == set(READERS)
