"""The log line of an output that has ended. It has neither the prompt nor the output."""

import logging

from common.logs import FIELDS
from gateway.requests.input.generate_request import client_rid
from gateway.requests.output_processor import OutputStream

log = logging.getLogger(__name__)


def log_request(stream: OutputStream) -> None:
    """Log one line; ``docs/logs.md`` describes its fields."""
    request = stream.request
    fields = {
        "rid": client_rid(request.rid),
        "request_id": request.request_id,
        "x_request_id": stream.x_request_id,
        "model": request.model,
        "tenant": request.tenant,
        "status": stream.end,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": stream.cached_tokens,
        "output_tokens": len(stream.ids),
        "num_attempts": stream.num_attempts,
        "ttft_s": round(stream.first_at - stream.started_at, 6) if stream.first_at else None,
        "duration_s": round(stream.ended_at - stream.started_at, 6),
        "prefill": stream.prefill,
        "decode": stream.decode,
        "priority_class": request.priority_class,
    }
    log.info("request ended", extra={FIELDS: fields})
