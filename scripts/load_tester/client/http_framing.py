"""Parses the head and the chunk framing of an HTTP/1.1 response."""

MAX_DIGITS = 8  # hexadecimal digits of a chunk size
HEX = b"0123456789abcdefABCDEF"


def read_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers (lower-case names) of a response head; status 0 if it is not HTTP."""
    line, *lines = head.split(b"\r\n")
    words = line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return 0, {}
    pairs = (entry.partition(b":") for entry in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


def chunk_size(line: bytes) -> int:
    """Size from the line before a chunk; -1 if it is invalid. ``int`` alone would accept signs and underscores."""
    digits = line.partition(b";")[0].strip()
    return int(digits, 16) if 0 < len(digits) <= MAX_DIGITS and not digits.strip(HEX) else -1


def follow_chunks(data: bytes) -> tuple[int, bool]:
    """Skip complete chunks.

    Returns:
        Offset of the first incomplete chunk (-1 if the framing is invalid), and whether the last chunk is complete,
        trailers included.
    """
    at = 0
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return at, False
        size = chunk_size(data[at:line_end])
        if size < 0:
            return -1, False
        if size == 0:
            is_over = data.startswith(b"\r\n", line_end + 2) or data.find(b"\r\n\r\n", line_end + 2) >= 0
            return at, is_over
        following = line_end + 2 + size + 2
        if following > len(data):
            return at, False
        at = following
