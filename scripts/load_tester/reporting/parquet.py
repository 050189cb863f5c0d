"""Writes one Parquet row per request, with the meaning of each column in the file.

Column descriptions are kept in the schema's field metadata under ``description``; ``schema_version`` is in the table's.
"""

from typing import Any

from common.errors import ConfigError, needs_extra
from scripts.load_tester.analysis.records import RequestRecord

SCHEMA_VERSION = "1"

#: name, Arrow type, meaning. Instants are seconds since the run's start; durations are seconds.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("index", "int64", "number in the schedule"),
    ("class_name", "string", "class of --mix"),
    ("tenant", "string", "tenant of the request"),
    ("session", "int64", "session; -1 for none"),
    ("turn", "int32", "turn of the session"),
    ("group", "int32", "group with a shared prefix; -1 for none"),
    ("priority", "int32", "asked for; null if none"),
    ("priority_class", "string", "asked for; empty for none"),
    ("deadline_ms", "double", "asked for, milliseconds; null if none"),
    ("num_input", "int32", "prompt tokens sent"),
    ("num_output_asked", "int32", "output tokens asked for"),
    ("num_output", "int32", "output tokens, as the server says, else as counted"),
    ("num_counted", "int32", "output tokens counted; events, if has_counts is false"),
    ("has_counts", "bool", "whether the server says how many tokens an event has"),
    ("usage_prompt", "int32", "prompt tokens by the server's usage; null if it gives none"),
    ("usage_output", "int32", "output tokens by the server's usage"),
    ("usage_cached", "int32", "cached prompt tokens by the server's usage"),
    ("ideal_cached", "int32", "prompt tokens that a perfect prefix cache would have held"),
    ("intended_s", "double", "when it should have gone out"),
    ("released_s", "double", "when the client turned to it"),
    ("sent_s", "double", "when it was written to an open connection; -1 if never"),
    ("ended_s", "double", "when the last byte arrived or the failure happened"),
    ("ttft_s", "double", "intended to first token; null without one"),
    ("e2e_s", "double", "intended to last token; null without one"),
    ("tpot_s", "double", "mean time per token after the first event; null if there is only one"),
    ("stamps_s", "list<double>", "instant of each event with output"),
    ("counts", "list<int32>", "tokens of each event with output"),
    ("status", "int32", "HTTP status; 0 without a response"),
    ("error", "string", "kind of failure; empty if it succeeded"),
    ("message", "string", "the server's words about it"),
    ("finish", "string", "finish reason"),
    ("request_id", "string", "the server's id"),
    ("prompt_digest", "string", "identifies the prompt, the same in every run with one seed and vocabulary"),
    ("timings", "map<double>", "stages timed by the server, seconds"),
    ("is_measured", "bool", "outside of warm-up and cool-down, and not cut off by Ctrl-C"),
    ("is_expected", "bool", "output equals the expected one; null if none is known"),
    ("is_retry", "bool", "sent again because a kept-alive connection had been closed"),
)


def require_pyarrow() -> Any:
    """Import pyarrow. Raises ConfigError: it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"--parquet {needs_extra('loadtest')}") from None
    return pyarrow


def write_parquet(records: list[RequestRecord], path: str) -> None:
    """Write all requests of a run as one row group."""
    arrow = require_pyarrow()
    from pyarrow import parquet

    types = {
        "list<double>": arrow.list_(arrow.float64()),
        "list<int32>": arrow.list_(arrow.int32()),
        "map<double>": arrow.map_(arrow.string(), arrow.float64()),
        "double": arrow.float64(),
        "bool": arrow.bool_(),
    }
    fields, columns = [], []
    for name, kind, meaning in COLUMNS:
        arrow_type = types.get(kind) or getattr(arrow, kind)()
        fields.append(arrow.field(name, arrow_type, metadata={"description": meaning}))
        columns.append(arrow.array([_value(record, name) for record in records], type=arrow_type))
    schema = arrow.schema(fields, metadata={"schema_version": SCHEMA_VERSION})
    parquet.write_table(arrow.Table.from_arrays(columns, schema=schema), path)


def _value(record: RequestRecord, name: str) -> Any:
    if name in ("ttft_s", "e2e_s") and not record.stamps_s:
        return None
    value = getattr(record, name)
    return list(value.items()) if name == "timings" else value
