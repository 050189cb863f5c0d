"""Calls as JSON objects in ``<tool_call>`` tags: Hermes 2 Pro, Qwen 2.5, Qwen 3.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Documented in the model card of NousResearch/Hermes-2-Pro-Llama-3-8B ("Prompt Format for Function Calling") and in the
chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B ("For each function call, return a json object with
function name and arguments within <tool_call></tool_call> XML tags"). Several calls follow each other, with a line
break between them. The tags are single tokens in the tokenizers of Qwen; others spell them.

A call without its end tag is complete with its JSON object. If the arguments are broken, what follows up to the end tag
is passed on as a part of them.
"""

from collections.abc import Mapping, Sequence

from gateway.text.incremental_parser import SPACE, Steps
from gateway.text.output_parser import Tool
from gateway.text.tool_parsers import grammar
from gateway.text.tool_parsers.base import ToolFormat, ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    def _parse(self) -> Steps[None]:
        return self._text_and_calls((BEGIN,), self._call)

    def _call(self, marker: str) -> Steps[str]:
        """Read a call behind its begin tag; return the begin tag of the next if the end tag is missing."""
        self._hold(marker)
        yield from self._run(SPACE, self._hold)
        if (yield from self._call_object()):
            yield from self._after_call((END,))
            return ""
        marker = yield from self._text_until((BEGIN, END), self._arguments)
        return BEGIN if marker == BEGIN else ""


class HermesFormat(ToolFormat):
    def __init__(self) -> None:
        super().__init__("hermes", (BEGIN, END))

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> HermesParser:
        return HermesParser(tools, token_ids)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        rules = grammar.calls_or_text(BEGIN, separator="\n", parallel=parallel, required=required, token_ids=token_ids)
        rules.append(f'body: "\\n" object "\\n" {grammar.marker(END, token_ids)}')
        rules += grammar.object_rules(tools, required=required)
        return "\n".join(rules)
