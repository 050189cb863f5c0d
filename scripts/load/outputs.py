"""A load test as a correctness test: outputs are written by one run and compared, token for token, by another.

A line of the file is ``{"prompt": digest, "max_tokens": n, "ids": [...], "text": "..."}``: the digest stands for the
request's pieces (so both runs need the same seed), or for the prompt itself where the user's own file gave one.
"""

from pathlib import Path

import msgspec

from common.errors import ConfigError
from scripts.load.config import LoadtestConfig
from scripts.load.metrics import Figures
from scripts.load.records import Record

MAX_SHOWN = 5


class Line(msgspec.Struct):
    prompt: str
    max_tokens: int
    text: str
    ids: list[int] = []


def save_outputs(records: list[Record], path: str) -> None:
    """Write the outputs of all requests that succeeded."""
    lines = [
        Line(record.prompt_digest, record.num_output_asked, record.text, record.ids)
        for record in records
        if record.is_ok
    ]
    Path(path).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_expected(config: LoadtestConfig) -> list[Line]:
    """The lines of --expect-file; none without it.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not config.expect_file:
        return []
    try:
        content = Path(config.expect_file).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Line) for line in content if line.strip()]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--expect-file {config.expect_file} cannot be read: {error}") from None


def compare_outputs(lines: list[Line], records: list[Record]) -> Figures:
    """Mark each record that an expected output is known for, and count."""
    expected = {(line.prompt, line.max_tokens): line for line in lines}
    compared = differ = by_text = 0
    shown: list[Figures] = []
    for record in records:
        line = expected.get((record.prompt_digest, record.num_output_asked))
        if line is None or not record.is_ok:
            continue
        compared += 1
        by_ids = bool(line.ids and record.ids)
        by_text += not by_ids
        record.is_expected = record.ids == line.ids if by_ids else record.text == line.text
        if not record.is_expected:
            differ += 1
            if len(shown) < MAX_SHOWN:
                shown.append({"index": record.index, "first_difference": _first_difference(record, line, by_ids)})
    counts = {"compared": compared, "by_text": by_text, "differ": differ, "not_compared": len(records) - compared}
    return counts | {"examples": shown}


def _first_difference(record: Record, line: Line, by_ids: bool) -> int:
    """Position of the first token (or character) that differs."""
    pair = zip(record.ids, line.ids, strict=False) if by_ids else zip(record.text, line.text, strict=False)
    for position, (one, other) in enumerate(pair):
        if one != other:
            return position
    return min(len(record.ids), len(line.ids)) if by_ids else min(len(record.text), len(line.text))
