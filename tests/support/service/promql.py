"""What PromQL queries of a dashboard use, and what a scrape has."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import AggregateExpr, BinaryExpr, Call, MatrixSelector, ParenExpr, VectorSelector

#: Values of a dashboard's variables that select everything.
VARIABLES = {"$__rate_interval": "1m", "$__range": "1m", "$model_name": "$m", "$model": ".*", "$node": ".*"}
_QUOTED_VARIABLE = re.compile(r'=~?"\$\w+"')

Labels = dict[str, str]


@dataclass(frozen=True)
class Selector:
    """One series selection of a query.

    Attributes:
        labels: names of the labels that its matchers use, or by which its results are grouped.
        equal: values that labels must have.
    """

    name: str
    labels: frozenset[str]
    equal: tuple[tuple[str, str], ...]


def selectors(query: str) -> list[Selector]:
    """Every selection of a query. Raises ValueError: the query is not valid."""
    plain = _QUOTED_VARIABLE.sub('=~".*"', query)
    for variable, value in VARIABLES.items():
        plain = plain.replace(variable, value)
    return list(_walk(promql_parser.parse(plain), frozenset()))


def _walk(expr: Any, groups: frozenset[str]) -> Iterator[Selector]:
    if isinstance(expr, VectorSelector):
        matchers = expr.matchers.matchers
        equal = tuple((m.name, m.value) for m in matchers if str(m.op) == "MatchOp.Equal")
        yield Selector(expr.name, groups | {m.name for m in matchers}, equal)
    elif isinstance(expr, MatrixSelector):
        yield from _walk(expr.vector_selector, groups)
    elif isinstance(expr, AggregateExpr):
        yield from _walk(expr.expr, groups | set(expr.modifier.labels if expr.modifier else ()))
    elif isinstance(expr, BinaryExpr):
        yield from _walk(expr.lhs, groups)
        yield from _walk(expr.rhs, groups)
    elif isinstance(expr, Call):
        for argument in expr.args:
            yield from _walk(argument, groups)
    elif isinstance(expr, ParenExpr):
        yield from _walk(expr.expr, groups)


def series_of(*scrapes: str) -> dict[str, list[Labels]]:
    """The label sets of every sample name in the texts of ``/metrics``."""
    found: dict[str, list[Labels]] = {}
    for text in scrapes:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def has_data(selector: Selector, series: dict[str, list[Labels]]) -> bool:
    """Whether a scrape has a series that the selection finds, with all labels that the query uses."""
    return any(
        selector.labels <= labels.keys() and all(labels[name] == value for name, value in selector.equal)
        for labels in series.get(selector.name, ())
    )
