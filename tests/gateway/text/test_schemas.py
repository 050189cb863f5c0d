"""What formats other than JSON read from a JSON schema."""

import pytest

from gateway.text.tool_parsers.schemas import ALL_TYPES, schema_types, without_look_around


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": [1, "a"]}, {"integer", "string"}),
        ({"const": None}, {"null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}]}]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, ALL_TYPES),
        ({"$ref": "#/$defs/one"}, {"number"}),
        ({"$ref": "#/$defs/missing"}, ALL_TYPES),
        ({"$ref": "#/properties/a/anyOf/1/items"}, {"boolean"}),
        ({"$ref": "#/properties/a/anyOf/2"}, ALL_TYPES),
        ({"$ref": "#/properties/a/anyOf/-1"}, ALL_TYPES),
        ({"$ref": "#"}, {"object"}),
        ({"$ref": "#/properties/a/anyOf/0/type/x"}, ALL_TYPES),
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
    ],
)
def test_the_types_of_a_schema(schema, types):
    items = {"a": {"anyOf": [{"type": "null"}, {"items": {"type": "boolean"}}]}}
    assert schema_types(schema, {"type": "object", "$defs": {"one": {"type": "number"}}, "properties": items}) == types


def test_a_reference_into_a_list_does_not_look_at_its_other_items():
    """Thousands of references into one long list would take minutes otherwise."""

    class Indexed(list):
        def __iter__(self):
            raise AssertionError("walked through")

    assert schema_types({"$ref": "#/anyOf/1"}, {"anyOf": Indexed([{}, {"type": "null"}])}) == {"null"}


def test_alternatives_that_refer_to_themselves_are_looked_at_once():
    """A search through all paths would take 20 ** 16 steps, on the event loop."""
    itself = [{"$ref": "#/$defs/tree"}] * 20
    root = {"$defs": {"tree": {"anyOf": [*itself, {"type": "integer"}, {"oneOf": itself}]}}}
    assert schema_types({"$ref": "#/$defs/tree"}, root) == {"integer"}


def test_only_patterns_with_look_around_are_left_out_of_a_schema():
    schema = {
        "properties": {"pattern": {"pattern": "(?=a)"}, "all": {"allOf": [{"pattern": r"(a)\1"}]}},
        "patternProperties": {"^(?!a)": {"type": "string"}, "^a": {"items": {"pattern": "a(?<!b)"}}},
        "const": {"pattern": "(?=a)"},
        "anyOf": [{"pattern": r"\(?=a"}, {"pattern": r"\\1"}, {"pattern": "(?:a)"}],
    }
    assert without_look_around(schema) == {
        **schema,
        "properties": {"pattern": {}, "all": {"allOf": [{}]}},
        "patternProperties": {"^a": {"items": {}}},
    }
