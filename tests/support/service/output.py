"""An output of ``serve`` that is kept in memory."""


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(f"serve: {text}")

    def relay(self, name: str, line: str) -> None:
        self.lines.append(f"{name} | {line}")
