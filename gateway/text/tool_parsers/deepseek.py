"""Calls between special tokens: DeepSeek-V3 and R1, and DeepSeek-V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>...

Documented in the chat templates of deepseek-ai/DeepSeek-V3-0324 (the first form) and deepseek-ai/DeepSeek-V3.1 (the
second, also in its model card under "ToolCall"). Several calls follow each other, behind a line break in the first
form. The parser reads both forms.
"""

import re
from collections.abc import Mapping, Sequence

from gateway.text.incremental_parser import SPACE, Steps, drop
from gateway.text.output_parser import Tool
from gateway.text.tool_parsers import grammar
from gateway.text.tool_parsers.base import MAX_CALLS, NotACall, ToolFormat, ToolParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_NAME_LINE = re.compile(r"[^\n`{]*")


class DeepSeekParser(ToolParser):
    def _parse(self) -> Steps[None]:
        return self._text_and_calls((CALLS_BEGIN, CALL_BEGIN), self._calls)

    def _calls(self, marker: str) -> Steps[str]:
        """Read calls up to text; return a begin marker if it ends broken arguments."""
        self._hold(marker)
        if marker == CALLS_BEGIN:
            yield from self._run(SPACE, self._hold)
            if not (yield from self._accept((CALL_BEGIN,), self._hold)):
                raise NotACall
        while True:
            if not (yield from self._call()):
                ends = (CALL_BEGIN, CALL_END, CALLS_END)
                marker = yield from self._text_until(ends, self._arguments)
                if marker == CALL_BEGIN:
                    return marker
            marker = yield from self._after_call((CALL_BEGIN, CALLS_END))
            if marker != CALL_BEGIN:
                return ""
            self._hold(marker)

    def _call(self) -> Steps[bool]:
        """Read a call up to its end marker; False if its arguments are broken."""
        num_before = len(self._held)
        if not (yield from self._text_until((SEP,), self._hold)):
            raise NotACall
        name = "".join(self._held[num_before:]).strip()
        self._hold(SEP)
        if (yield from self._peek()) != "{":
            num_before = len(self._held)
            yield from self._run(_NAME_LINE, self._hold)
            name = "".join(self._held[num_before:]).strip()
            if not (yield from self._peek()):
                raise NotACall
        self._begin(name)
        yield from self._run(SPACE, drop)
        yield from self._literal("```json", drop)
        yield from self._run(SPACE, drop)
        if not (yield from self._json(self._arguments)):
            return False
        yield from self._run(SPACE, self._text)
        yield from self._literal("```", drop)
        yield from self._after_call((CALL_END,))
        return True


class DeepSeekFormat(ToolFormat):
    """
    Args:
        writes_fence: the models write the arguments in a code fence, as DeepSeek-V3 does.
    """

    def __init__(self, name: str, *, writes_fence: bool) -> None:
        super().__init__(name, (CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END))
        self._writes_fence = writes_fence

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> DeepSeekParser:
        return DeepSeekParser(tools, token_ids)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        begin, sep, end, calls_end = (
            grammar.marker(text, token_ids) for text in (CALL_BEGIN, SEP, CALL_END, CALLS_END)
        )
        rules = grammar.calls_or_text(CALLS_BEGIN, separator="", parallel=False, required=required, token_ids=token_ids)
        separator = '"\\n" ' if self._writes_fence else ""
        more = f" ({separator}one){{0,{MAX_CALLS - 1}}}" if parallel else ""
        rules.append(f"body: one{more} {calls_end}")
        rules.append(f"one: {begin} ({grammar.alternatives('one', len(tools))}) {end}")
        for i, tool in enumerate(tools):
            if self._writes_fence:
                head = f'"function" {sep} {grammar.literal(tool.name + chr(10) + "```json" + chr(10))}'
                rules.append(f'one_{i}: {head} arguments_{i} "\\n```"')
            else:
                rules.append(f"one_{i}: {grammar.literal(tool.name)} {sep} arguments_{i}")
            rules.append(f"arguments_{i}: {grammar.arguments(tool, required=required)}")
        return "\n".join(rules)
