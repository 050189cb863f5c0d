"""HTTP/1.1 as it lies in the bytes of a response: its head, and the chunks of its body."""

MAX_DIGITS = 8  # of a chunk's size
HEX = b"0123456789abcdefABCDEF"


def read_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers (names in lower case) of a response's head; status 0 if it is none."""
    line, *lines = head.split(b"\r\n")
    words = line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return 0, {}
    pairs = (entry.partition(b":") for entry in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


def chunk_size(line: bytes) -> int:
    """What the line before a chunk says; -1 if it is none. Python's ``int`` would take signs and underscores, too."""
    digits = line.partition(b";")[0].strip()
    return int(digits, 16) if 0 < len(digits) <= MAX_DIGITS and not digits.strip(HEX) else -1


def follow_chunks(data: bytes, at: int) -> tuple[int, bool]:
    """Step over whole chunks from ``at`` on.

    Returns:
        Where the first chunk begins that is not whole yet (-1: there is no chunk there), and whether the last one,
        with its trailers, has been passed.
    """
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
