"""Words of others (a server's, a trace's, a command line's), made fit to be shown: on a terminal, in HTML, in XML."""

import html

UNKNOWN = "\ufffd"


def plain(words: str) -> str:
    """Without what moves a cursor or ends a line, and what no encoding or no XML has."""
    return words if words.isprintable() else "".join(char if char.isprintable() else UNKNOWN for char in words)


def escaped(words: str) -> str:
    """As text of HTML or XML, in attributes too; lines stay lines."""
    return html.escape("\n".join(plain(line) for line in words.split("\n")))
