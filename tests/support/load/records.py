"""Request records for tests of the load tester's analysis."""

from typing import Any

from scripts.load_tester.analysis.records import RequestRecord

PLAIN: dict[str, Any] = {
    "index": 0, "class_name": "", "tenant": "", "session": -1, "turn": 0, "group": -1, "priority": None,
    "priority_class": "", "deadline_ms": None, "slos": {}, "num_input": 10, "num_output_asked": 3, "ideal_cached": 0,
    "prompt_digest": "d",
    "intended_s": 0.0, "released_s": 0.0, "sent_s": 0.0, "ended_s": 1.0, "stamps_s": [], "counts": [],
    "has_counts": False, "status": 200, "error": "", "message": "", "finish": "length", "num_output": 0,
    "num_counted": 0, "usage_prompt": None, "usage_output": None, "usage_cached": None, "num_events": 0,
    "request_id": "", "timings": {}, "text": "", "ids": [], "is_retry": False,
}  # fmt: skip


def record(*stamps: float, at: float = 0.0, late: float = 0.0, **fields: Any) -> RequestRecord:
    """Return a record of a request intended at ``at``, sent ``late`` seconds later, with tokens at ``stamps``."""
    own = {
        "intended_s": at,
        "released_s": at + late,
        "sent_s": at + late,
        "stamps_s": list(stamps),
        "counts": [1] * len(stamps),
        "num_counted": len(stamps),
        "num_output": len(stamps),
        "ended_s": stamps[-1] if stamps else at + 1.0,
    }
    return RequestRecord(**PLAIN | own | fields)
