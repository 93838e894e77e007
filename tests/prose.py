"""Idioms that a reader of technical English stumbles over: their patterns, and how often a text has them.

A document, docstring or comment names its subject and uses the field's verbs (CONTRIBUTING.md, Prose). The patterns
find the most frequent departures. They count, they do not grade: a text is re-read and rewritten, not searched and
replaced.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import Final

PER: Final = 10_000
"""Words to which rates refer."""

INSTEAD: Final = {
    "report, send, notify": r"tell|tells|told|telling",
    "report, state, specify": r"say|says|said|saying",
    "learn of, receive": r"hear(?:s|d|ing)? (?:of|from)",
    "continue, resume": r"(?:go|goes|going|went|gone) on\b(?! (?:a|the|one) (?:node|machine|rank))",
    "abandon, declare dead": r"(?:give|gives|gave|given|giving) up",
    "release": r"(?:let|lets|letting) go",
    "again": r"anew",
    "the noun": r"the (?:latter|former)",
    "whose, with": r"of (?:whom|which)(?= (?:a|an|the|it|they|one|no|some|all|each|every)\b)",
    "the agent, worker, rank, user": r"(?:any|every|no|some)body|whoever",
    "the noun that is meant": r"(?:knows?|shows?|of|from|with|by|and|is|for|to|in) what(?= (?:is|was|it|they|has)\b)",
    "the agent, worker or rank that": r"(?:of|from|with|by|and|is|for|to) who(?= (?:is|was|has|comes?|goes)\b)",
}
PATTERNS: Final = {advice: re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE) for advice, pattern in INSTEAD.items()}
CODE: Final = re.compile(r"```.*?```|^    .*?$|`[^`\n]+`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


def prose_of_markdown(source: str) -> str:
    """Text of a Markdown document without code and link targets."""
    return CODE.sub(" ", source)


def prose_of_python(source: str) -> str:
    """Docstrings (of modules, classes, functions and fields) and comments of a module."""
    nodes = (node.value.value for node in ast.walk(ast.parse(source)) if _is_text(node))  # type: ignore[attr-defined]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*nodes, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def idioms(text: str) -> list[str]:
    """Each idiom found, with the words to use instead."""
    return [f"{found.group()!r} ({advice})" for advice, pattern in PATTERNS.items() for found in pattern.finditer(text)]


def rate(hits: int, words: int) -> float:
    """Idioms per 10,000 words."""
    return PER * hits / max(1, words)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
