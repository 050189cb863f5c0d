"""Hypothesis strategies for the messages of the control plane, from the types with which they are decoded."""

import functools
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from common.stage_spans import StageSpan
from common.wire.messages import MAX_AMOUNT, MAX_SECONDS, Generate

MAX_ITEMS = 3


@functools.cache  # building a strategy takes longer than drawing from it
def messages_of(union: Any) -> st.SearchStrategy[Any]:
    """Valid messages, as the values that MessagePack encodes."""
    return strategy_of(inspect.type_info(union))


def strategy_of(told: inspect.Type) -> st.SearchStrategy[Any]:
    if isinstance(told, inspect.StructType):
        fields = {field.encode_name: strategy_of(field.type) for field in told.fields}
        if told.array_like:
            return st.tuples(*fields.values()).map(list)
        if told.tag_field is not None:
            fields[told.tag_field] = st.just(told.tag)
        if told.cls is Generate:  # samples of one prompt have outputs of their own
            alone, several = fields | {"others": st.just([])}, fields | {"output": st.just([])}
            return st.fixed_dictionaries(alone) | st.fixed_dictionaries(several)
        return st.fixed_dictionaries(fields)
    if isinstance(told, inspect.DataclassType):
        return st.fixed_dictionaries({field.encode_name: strategy_of(field.type) for field in told.fields})
    if isinstance(told, inspect.NamedTupleType):
        values = {field.name: strategy_of(field.type) for field in told.fields}
        if told.cls is StageSpan:
            seconds = st.floats(0.0, MAX_SECONDS)
            values |= {"start_s": seconds, "duration_s": seconds, "amount": st.integers(0, MAX_AMOUNT)}
        return st.tuples(*values.values()).map(list)
    if isinstance(told, inspect.UnionType):
        return st.one_of([strategy_of(one) for one in told.types])
    if isinstance(told, inspect.IntType):
        lowest = told.ge if told.ge is not None else -(1 << 63)
        highest = told.le if told.le is not None else (told.lt - 1 if told.lt is not None else (1 << 63) - 1)
        return st.integers(lowest, highest) | st.integers(lowest, min(highest, lowest + 4))
    if isinstance(told, inspect.FloatType):
        least = told.ge if told.ge is not None else told.gt
        return st.floats(min_value=least, max_value=told.le, exclude_min=told.gt is not None)
    if isinstance(told, inspect.StrType):
        if told.pattern is not None:
            return st.from_regex(told.pattern).map(lambda text: text.rstrip("\n"))
        lowest = told.min_length or 0
        return st.text(st.characters(codec="utf-8"), min_size=lowest, max_size=min(told.max_length or 20, lowest + 20))
    if isinstance(told, inspect.VarTupleType):
        highest = min(told.max_length or MAX_ITEMS, MAX_ITEMS)
        return st.lists(strategy_of(told.item_type), min_size=told.min_length or 0, max_size=highest)
    if isinstance(told, inspect.TupleType):
        return st.tuples(*map(strategy_of, told.item_types)).map(list)
    if isinstance(told, inspect.DictType):
        return st.dictionaries(strategy_of(told.key_type), strategy_of(told.value_type), max_size=MAX_ITEMS)
    if isinstance(told, inspect.LiteralType):
        return st.sampled_from(told.values)
    if isinstance(told, inspect.EnumType):
        return st.sampled_from([member.value for member in told.cls])
    if isinstance(told, inspect.BoolType):
        return st.booleans()
    if isinstance(told, inspect.BytesType):
        return st.binary(max_size=min(told.max_length or 20, 20))
    assert isinstance(told, inspect.NoneType), told
    return st.none()


#: Any MessagePack.
TREES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=10,
)
