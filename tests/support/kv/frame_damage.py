"""Damage to frames on their way."""

from collections.abc import Sequence

from hypothesis import strategies as st

Change = tuple[str, int, int]


changes = st.lists(
    st.tuples(
        st.sampled_from(("lose", "repeat", "swap", "cut", "flip", "invent", "lengthen")),
        st.integers(0, 1000),
        st.integers(0, 1000),
    ),
    min_size=1,
    max_size=4,
)


def mangled(frames: Sequence[bytes], changes: Sequence[Change], header_bytes: int | None = None) -> list[bytes]:
    """Frames with these changes. ``header_bytes``: only so many at the beginning of a frame are flipped."""
    found = list(frames)
    for kind, a, b in changes:
        if not found:
            return [b"\0" * (a % 64)]
        i, j = a % len(found), b % len(found)
        if kind == "lose":
            del found[i]
        elif kind == "repeat":
            found.insert(j, found[i])
        elif kind == "swap":
            found[i], found[j] = found[j], found[i]
        elif kind == "cut":
            del found[i + 1 :]
            found[i] = found[i][: b % (len(found[i]) + 1)]
        elif kind == "flip":
            room = max(1, min(header_bytes or len(found[i]), len(found[i])))
            found[i] = (
                found[i][: b % room] + bytes(x ^ 0x41 for x in found[i][b % room :][:1]) + found[i][b % room + 1 :]
            )
        elif kind == "invent":
            found.insert(i, bytes((b + n * a) % 256 for n in range(1 + b % 200)))
        else:
            found[i] += bytes(1 + b % 300)
    return found
