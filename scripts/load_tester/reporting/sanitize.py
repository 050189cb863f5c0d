"""Makes text from a server, a trace or a command line safe to show on a terminal, in HTML and in XML."""

import html

REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """Text with every unprintable character replaced, line ends included."""
    return text if text.isprintable() else "".join(char if char.isprintable() else REPLACEMENT for char in text)


def printable_lines(text: str) -> str:
    """Text with every unprintable character but line ends replaced."""
    return "\n".join(map(printable, text.split("\n")))


def escape(text: str) -> str:
    """Printable text escaped for HTML and XML, attributes included."""
    return html.escape(printable_lines(text))
