"""A window of time as a trace in Chrome's JSON format, which ui.perfetto.dev opens.

The gateway and every node are a process. Outputs that overlap in a process get tracks of their own, so that the spans
of one track never overlap unless one contains the other, as the format demands.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from gateway.tracing.timelines import GATEWAY, Timeline, TimelineSpan

MICROSECONDS = 1e6


def chrome_trace(timelines: Iterable[Timeline], now: float) -> dict[str, Any]:
    """The trace of these outputs; its zero is the beginning of the first span."""
    tracks = _Tracks()
    events: list[dict[str, Any]] = []
    ordered = sorted(timelines, key=lambda one: one.started_at)
    processes = [(timeline, spans) for timeline in ordered for spans in _by_process(timeline, now).values()]
    zero = min((spans[0].start_at for _, spans in processes), default=0.0)
    for timeline, spans in processes:
        end_at = max(span.start_at + span.duration_s for span in spans)
        pid, tid = tracks.place(spans[0].process, spans[0].start_at, end_at)
        events += [_complete(span, timeline, pid, tid, zero) for span in _nested(spans)]
    return {"traceEvents": [*tracks.names(), *events], "displayTimeUnit": "ms"}


def _by_process(timeline: Timeline, now: float) -> dict[str, list[TimelineSpan]]:
    """The spans of each process in order; the gateway's first is the whole output."""
    duration_s = max(timeline.end_at(now) - timeline.started_at, 0.0)
    whole = TimelineSpan("request", GATEWAY, timeline.started_at, duration_s, {"status": timeline.status})
    processes = {GATEWAY: [whole]}
    for span in timeline.spans(now):
        processes.setdefault(span.process, []).append(span)
    return processes


def _nested(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """The spans, each cut at the end of the span that contains its beginning."""
    nested: list[TimelineSpan] = []
    open_until: list[float] = []
    for span in spans:
        while open_until and open_until[-1] <= span.start_at:
            open_until.pop()
        end_at = min([span.start_at + span.duration_s, *open_until])
        open_until.append(end_at)
        nested.append(span._replace(duration_s=end_at - span.start_at))
    return nested


def _complete(span: TimelineSpan, timeline: Timeline, pid: int, tid: int, zero: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": "request",
        "pid": pid,
        "tid": tid,
        "ts": round((span.start_at - zero) * MICROSECONDS, 3),
        "dur": round(span.duration_s * MICROSECONDS, 3),
        "args": {"rid": timeline.rid, **span.attributes},
    }


class _Tracks:
    """Numbers processes, and in each the tracks, taking the first track that is free."""

    def __init__(self) -> None:
        self._free_at: dict[str, list[float]] = {GATEWAY: []}
        self._pids = {GATEWAY: 1}

    def place(self, process: str, begin_at: float, end_at: float) -> tuple[int, int]:
        """The numbers of the process and of the track."""
        tracks = self._free_at.setdefault(process, [])
        pid = self._pids.setdefault(process, len(self._pids) + 1)
        number = next((i for i, free_at in enumerate(tracks) if free_at <= begin_at), len(tracks))
        tracks[number : number + 1] = [end_at]
        return pid, number + 1

    def names(self) -> list[dict[str, Any]]:
        """The events that name processes and tracks."""
        events: list[dict[str, Any]] = []
        for process, pid in self._pids.items():
            events.append(_metadata("process_name", pid, 0, {"name": process}))
            events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
            for tid in range(1, len(self._free_at[process]) + 1):
                events.append(_metadata("thread_name", pid, tid, {"name": f"requests {tid}"}))
        return events


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
