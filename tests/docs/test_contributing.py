"""The code that CONTRIBUTING shows fits into the code that is there."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from support.engine.reference_models import FAMILIES, make_model
from support.gateway.outputs import TOOLS, calls, cut, parse, texts

from common.config.scheduling import POLICIES
from common.engine.models import config as model_config
from common.engine.models.config import ModelConfig
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.policies import factory
from common.scheduling.policies.base import Policy
from gateway.text import incremental_parser
from gateway.text.tool_parsers import base, grammar
from gateway.text.tool_parsers.registry import FORMATS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "CONTRIBUTING.md").read_text()


def blocks(section: str) -> list[str]:
    """The Python blocks of a section."""
    (part,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", TEXT, flags=re.S | re.M)
    return [textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", part, flags=re.S | re.M)]


def test_the_example_of_a_model_is_a_family_that_is_then_served(tmp_path, monkeypatch):
    family, reference = blocks("Add a model")
    scope: dict[str, Any] = {"Family": model_config.Family}
    added = eval("{" + family + "}", scope)
    (architecture,) = added
    assert architecture not in model_config.ARCHITECTURES, "it is a known family now: the page needs another example"
    assert not set(eval("{" + reference + "}")) & set(FAMILIES)
    monkeypatch.setattr(model_config, "ARCHITECTURES", model_config.ARCHITECTURES | added)
    config = make_model(tmp_path, "llama", seed=1) / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", architecture))
    model = ModelConfig.load(str(tmp_path))
    assert (model.has_qkv_bias, model.has_o_bias) == (True, False)


def test_the_example_of_a_policy_is_one(monkeypatch):
    (code,) = blocks("Add a scheduling policy")
    scope: dict[str, Any] = {"Policy": Policy, "Sequence": Sequence, "Request": Request}
    exec(code, scope)
    policy = scope["LastComeFirstServed"]()
    assert policy.name not in POLICIES, "it is a known policy now: the page needs another example"
    requests = [Request(str(n), 0, (1,), SamplingParams(max_new_tokens=1), arrived_at=n) for n in range(3)]
    assert [request.rid for request in policy.order(requests, 3.0)] == ["2", "1", "0"]
    monkeypatch.setattr(factory, "_POLICIES", {**factory._POLICIES, policy.name: lambda settings: policy})
    assert factory.make_policy(policy.name) is policy


@pytest.mark.parametrize("are_tokens", [True, False])
def test_the_example_of_a_tool_call_format_reads_calls_and_forces_them(are_tokens):
    (code,) = blocks("Add a tool call format")
    scope = {**vars(base), **vars(incremental_parser), "grammar": grammar}
    exec(code, scope)
    format = scope["JambaFormat"]()
    assert format.name not in FORMATS, "it is a known format now: the page needs another example"
    markers = format.markers if are_tokens else ()
    ids = {marker: i for i, marker in enumerate(markers)}
    objects = '{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}'
    text = f"Let me see.\n<tool_calls>[{objects}]</tool_calls>"
    for places in ((), range(len(text))):
        pieces = parse(format.parser(TOOLS, token_ids=ids), cut(text, markers, places))
        assert texts(pieces) == "Let me see."
        assert calls(pieces) == [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]
    for other in ("<tool_calls>none</tool_calls>", '<tool_calls>[{"name": "sing", "arguments": {}}]</tool_calls>'):
        assert texts(parse(format.parser(TOOLS, token_ids=ids), cut(other, markers, range(len(other))))) == other
    for required in (True, False):
        rules = format.grammar(TOOLS, parallel=True, required=required, token_ids=ids)
        assert not LLMatcher.validate_grammar(rules)


def test_every_section_has_its_example():
    assert re.findall(r"^## Add an? ([a-z ]+)$", TEXT, re.M) == [
        "model", "transport", "scheduling policy", "endpoint", "tool call format",
    ]  # fmt: skip
    for kind in ("a transport", "an endpoint"):
        assert blocks(f"Add {kind}")
