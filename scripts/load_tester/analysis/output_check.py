"""Compares outputs, token for token, with those of another run, from its ``--jsonl``.

The check passes if every output of the file was compared and all are equal.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from common.errors import ConfigError, reason_of
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.config import LoadtestConfig

MAX_SHOWN = 5
Key = tuple[str, int]  # digest of the prompt, and tokens asked for


class ExpectedOutput(msgspec.Struct):
    """What the check needs of a ``RequestRecord``."""

    prompt_digest: str
    num_output_asked: int
    error: str
    text: str
    ids: list[int] = []

    @property
    def key(self) -> Key:
        return self.prompt_digest, self.num_output_asked


def read_expected(config: LoadtestConfig) -> dict[Key, ExpectedOutput]:
    """Read ``--expect-file``; empty without it.

    Raises ConfigError: the file cannot be read, is empty, or has two different outputs for one request.
    """
    path = config.expect_file
    if not path:
        return {}
    try:
        content = Path(path).read_bytes().splitlines()
        lines = [msgspec.json.decode(line, type=ExpectedOutput) for line in content if line.strip()]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--expect-file {path} cannot be read: {reason_of(error)}") from None
    found: dict[Key, ExpectedOutput] = {}
    for line in lines:
        if line.error:
            continue
        other = found.setdefault(line.key, line)
        if not _is_equal(other, line):
            raise ConfigError(f"--expect-file {path} has two different outputs for one prompt ({line.prompt_digest})")
    if not found:
        raise ConfigError(f"--expect-file {path} has no output")
    return found


def compare_outputs(expected: Mapping[Key, ExpectedOutput], records: list[RequestRecord]) -> Figures:
    """Set ``is_expected`` of each record with an expected output, and count.

    Returns:
        ``expected``: different requests in the file; ``not_sent``: of these, never sent; ``not_expected``: requests not
        in the file; ``unanswered``: requests in the file that failed; ``compared``: of these ``by_text`` and
        ``differ``; ``is_passed``; ``examples`` of differing outputs.
    """
    sent: set[Key] = set()
    not_expected = unanswered = compared = differ = by_text = 0
    shown: list[Figures] = []
    for record in records:
        key = (record.prompt_digest, record.num_output_asked)
        if key not in expected:
            not_expected += 1
            continue
        sent.add(key)
        if not record.is_ok:
            unanswered += 1
            continue
        line = expected[key]
        compared += 1
        by_text += not (line.ids and record.ids)
        record.is_expected = _is_equal(record, line)
        if not record.is_expected:
            differ += 1
            if len(shown) < MAX_SHOWN:
                shown.append({"index": record.index, "first_difference": _first_difference(record, line)})
    not_sent = len(expected) - len(sent)
    return {
        "is_passed": compared > 0 and not (differ or unanswered or not_sent),
        "expected": len(expected),
        "compared": compared,
        "by_text": by_text,
        "differ": differ,
        "unanswered": unanswered,
        "not_sent": not_sent,
        "not_expected": not_expected,
        "examples": shown,
    }


def _is_equal(one: RequestRecord | ExpectedOutput, other: ExpectedOutput) -> bool:
    """Compare tokens where both have them, else text."""
    return one.ids == other.ids if one.ids and other.ids else one.text == other.text


def _first_difference(record: RequestRecord, line: ExpectedOutput) -> int:
    """Position of the first differing token (or character)."""
    by_ids = bool(record.ids and line.ids)
    pair = zip(record.ids, line.ids, strict=False) if by_ids else zip(record.text, line.text, strict=False)
    for position, (one, other) in enumerate(pair):
        if one != other:
            return position
    return min(len(record.ids), len(line.ids)) if by_ids else min(len(record.text), len(line.text))
