"""Calls behind ``[TOOL_CALLS]``: the models of Mistral AI.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}

The first form, a list of calls, is that of tokenizer versions 3 and 7 (Mistral 7B v0.3, Nemo, Small 3.1), with a space
before the list in some of them; the second, with one marker for each call, is that of version 11, which puts
``[CALL_ID]`` and an id before the arguments, and of later ones (Small 3.2, Magistral, Devstral). Documented in
"Tokenization: Tool Calling" of docs.mistral.ai, in mistralai/mistral-common (tokens/tokenizers/instruct.py), and in the
chat templates. The markers are control tokens. The parser reads both forms.
"""

import re
from collections.abc import Mapping, Sequence

from gateway.text.incremental_parser import SPACE, Steps, drop
from gateway.text.output_parser import Tool
from gateway.text.tool_parsers import grammar
from gateway.text.tool_parsers.base import MAX_CALLS, NotACall, ToolFormat, ToolParser

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME = re.compile(r"[\w.\-]*")


class MistralParser(ToolParser):
    def _parse(self) -> Steps[None]:
        return self._text_and_calls((CALLS,), self._calls)

    def _calls(self, marker: str) -> Steps[str]:
        """Read what follows ``[TOOL_CALLS]``; return the next one if it ends broken arguments."""
        self._hold(marker)
        yield from self._run(SPACE, self._hold)
        if (yield from self._literal("[", self._hold)):
            is_complete = yield from self._list()
        else:
            is_complete = yield from self._named()
        return "" if is_complete else (yield from self._text_until((CALLS,), self._arguments))

    def _list(self) -> Steps[bool]:
        while True:
            yield from self._run(SPACE, self._hold)
            if not (yield from self._call_object()):
                return False
            yield from self._run(SPACE, self._text)
            if not (yield from self._literal(",", self._hold)):
                yield from self._literal("]", drop)
                return True

    def _named(self) -> Steps[bool]:
        num_before = len(self._held)
        yield from self._run(_NAME, self._hold)
        name = "".join(self._held[num_before:])
        if (yield from self._accept((CALL_ID,), self._hold)):
            yield from self._run(_NAME, self._hold)
        if not (yield from self._accept((ARGS,), self._hold)) and (yield from self._peek()) != "{":
            raise NotACall
        self._begin(name)
        yield from self._run(SPACE, drop)
        return (yield from self._json(self._arguments))


class MistralFormat(ToolFormat):
    """
    Args:
        writes_list: the models write a list of calls, not ``[ARGS]``.
    """

    def __init__(self, name: str, *, writes_list: bool) -> None:
        super().__init__(name, (CALLS, ARGS, CALL_ID))
        self._writes_list = writes_list

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> MistralParser:
        return MistralParser(tools, token_ids)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        if self._writes_list:
            more = f' (", " object){{0,{MAX_CALLS - 1}}}' if parallel else ""
            rules = grammar.calls_or_text(CALLS, separator="", parallel=False, required=required, token_ids=token_ids)
            rules.append(f'body: " "? "[" object{more} "]"')
            return "\n".join(rules + grammar.object_rules(tools, required=required))
        rules = grammar.calls_or_text(CALLS, separator="", parallel=parallel, required=required, token_ids=token_ids)
        rules.append(f"body: {grammar.alternatives('body', len(tools))}")
        for i, tool in enumerate(tools):
            args = grammar.marker(ARGS, token_ids)
            rules.append(f"body_{i}: {grammar.literal(tool.name)} call_id? {args} arguments_{i}")
            rules.append(f"arguments_{i}: {grammar.arguments(tool, required=required)}")
        rules.append(f"call_id: {grammar.marker(CALL_ID, token_ids)} /[0-9A-Za-z]{{9}}/")
        return "\n".join(rules)
