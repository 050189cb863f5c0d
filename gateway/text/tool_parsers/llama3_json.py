"""Calls as bare JSON objects: Llama 3.1, 3.2 and 3.3.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

Documented as "JSON based tool calling" in models/llama3_1/prompt_format.md of meta-llama/llama-models, and in the chat
template of meta-llama/Llama-3.1-8B-Instruct. A call may follow ``<|python_tag|>``, a special token; other calls stand
at the beginning of an output. The models were trained for one call; several are separated by semicolons, as SGLang and
vLLM read them.
"""

from collections.abc import Mapping, Sequence

from gateway.text.incremental_parser import SPACE, Steps
from gateway.text.output_parser import Tool
from gateway.text.tool_parsers import grammar
from gateway.text.tool_parsers.base import ToolFormat, ToolParser

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    def _parse(self) -> Steps[None]:
        yield from self._run(SPACE, self._text)
        yield from self._text_and_calls((TAG,), self._calls, may_begin_at_once=True)

    def _calls(self, marker: str) -> Steps[str]:
        """Read calls up to text; return the tag if it ends broken arguments."""
        if marker:
            self._hold(marker)
        else:
            yield from self._accept((TAG,), self._hold)
        while True:
            yield from self._run(SPACE, self._hold)
            if not (yield from self._call_object()):
                return (yield from self._text_until((TAG,), self._arguments))
            yield from self._run(SPACE, self._text)
            yield from self._literal(";", self._hold)
            yield from self._run(SPACE, self._hold)
            yield from self._accept((TAG,), self._hold)


class Llama3JsonFormat(ToolFormat):
    def __init__(self) -> None:
        super().__init__("llama3-json", (TAG,))

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> Llama3JsonParser:
        return Llama3JsonParser(tools, token_ids)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        """Calls without the tag; unless ``required``, they may stand behind it, too."""
        if required:
            return "\n".join(grammar.bare_calls(tools, "parameters", parallel=parallel, separator="; "))
        heads = grammar.object_heads(tools, "parameters")
        rules = grammar.calls_at_start(heads, opening="", separator="; ", closing="", parallel=parallel)
        names = "|".join(grammar.pattern(tool.name) for tool in tools)
        rules += grammar.other_text(rf'\s*\{{\s*"name"\s*:\s*"({names})"', (TAG,), token_ids)
        for i, tool in enumerate(tools):
            rules.append(f'tail_{i}: arguments_{i} "}}"')
            rules.append(f"arguments_{i}: {grammar.arguments(tool, required=False)}")
        return "\n".join(rules)
