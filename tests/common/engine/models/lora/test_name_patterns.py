"""Patterns for names match what Python's ``re`` matches with PEFT's rule, in a time that has a bound."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from common.engine.models.lora.name_patterns import MAX_LENGTH, NamePattern

NAME = "model.layers.10.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("q_proj", True),
        ("_proj", False),  # a name's part begins behind a dot
        ("self_attn.q_proj", True),
        ("self_attn.k_proj", False),
        ("q_proj.", False),
        (r"layers\.10\..*", True),
        ("layers.1..self_attn.q_proj", True),
        (r".*\.q_proj", True),
        ("^q_proj", False),
        (r"^model\.layers\.10\.self_attn\.q_proj$", True),
        (r"^layers\.10\.self_attn\.q_proj", False),
        (r"layers\.10\.self_attn\.q_proj$", True),
        (r"layers.10.self.attn\.q_proj", True),
        (r"layers.10.self\.attn.q_proj", False),
        ("^model.*q_proj$", True),
        (r"layers\.(9|10|11)\.self_attn\.(q|k)_proj", True),
        (r"layers\.[0-9]+\.(?:self_attn|mlp)\.[^k]_proj", True),
        (r"layers\.\d{2}\..*", True),
        (r"layers\.\d{3}\..*", False),
        (r"layers\.\d{0,1}\d{1,}?\..+?", True),
        ("k_proj|q_proj", True),
        ("", False),
        (".*", True),
        ("model", False),
    ],
)
def test_a_pattern_matches_a_name_from_a_dot_to_the_end(pattern: str, is_match: bool) -> None:
    assert NamePattern(pattern).matches(NAME) == is_match
    assert bool(re.match(rf"(.*\.)?({pattern})$", NAME)) == is_match


characters = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", "^", "$"])
patterns = st.recursive(
    characters,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4).map("".join),
        st.lists(parts, min_size=1, max_size=3).map("|".join),
        parts.map(lambda part: f"({part})"),
        st.tuples(parts, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,}", "{0,2}", "{2,3}"])).map(
            lambda both: f"(?:{both[0]}){both[1]}"
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(500), deadline=None)
@given(pattern=patterns, name=st.text("ab.", max_size=7))
def test_a_pattern_matches_what_re_matches(pattern: str, name: str) -> None:
    try:
        found = NamePattern(pattern)
    except ValueError:
        assert len(pattern) > MAX_LENGTH or pattern.count("(") > 8
        return
    assert found.matches(name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a*)*b", "(a|a)" * 60 + "b", "a?" * 100 + "a" * 100, "((a{0,99}){99}){99}b"),
        "(.|" * 7 + ".*z" + ")*z" * 7,
    ],
)
def test_a_pattern_that_is_made_to_take_forever_does_not(pattern: str) -> None:
    assert not NamePattern(pattern).matches("a" * 70)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?P<x>a)", r"(a)\1", "a*+", "(", ")", "a)", "[", "[]", "[b-a]", "*", "a**", "a{1,2", "{2}", "\\"),
        *(r"\A", "a" * (MAX_LENGTH + 1), "(" * 9 + ")" * 9),
    ],
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"not supported|characters|range"):
        NamePattern(pattern)
