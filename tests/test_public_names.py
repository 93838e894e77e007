"""The public names are these, and load lazily; a class name, and a word of the glossary, stands for one thing."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from prose import prose_of_markdown, prose_of_python

import unicron_lightning

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("unicron_lightning", "strategies", "callbacks", "hydra_plugins")
GLOSSARY = ROOT / "docs" / "glossary.md"
VARIABLES = ("TypeVar", "ParamSpec")
"""Calls whose result has a name of one letter, too."""
MOST_FILES = 3
"""Files of one name in several packages."""
LEAST_USES = 2
"""Uses of a term of the glossary in other documents and in the package's docstrings and comments."""


def test_the_public_names() -> None:
    strategies = ["UnicronFSDPStrategy", "UnicronMegatronStrategy", "UnicronStrategy"]
    assert unicron_lightning.__all__ == ["LocalCluster", "Run", *strategies, "__version__"]


def test_the_version_is_the_installed_one() -> None:
    assert unicron_lightning.__version__ == version("unicron-lightning")


def test_dir_shows_the_lazy_names() -> None:
    assert set(unicron_lightning.__all__) <= set(dir(unicron_lightning))


def test_the_strategy_is_the_one_of_the_strategies_package() -> None:
    module = importlib.import_module("unicron_lightning.strategies.unicron")
    assert unicron_lightning.UnicronStrategy is module.UnicronStrategy


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = unicron_lightning.nothing


def test_each_class_and_alias_is_defined_once() -> None:
    assert repeated({str(path.relative_to(ROOT)): path.read_text() for path in sources()}) == {}


def test_a_name_that_is_defined_twice_is_found() -> None:
    planted = {
        "a.py": "class Row:\n    pass\nPlace = tuple[str, str]\nItem = TypeVar('Item')\nPair = NewType('Pair', int)",
        "b.py": "class _Row(NamedTuple):\n    class Pair:\n        pass\nPlace: TypeAlias = int",
        "c.py": "if TYPE_CHECKING:\n    Item = list[int]\nLIMIT = 1\nname = 2",
        "d.py": "LIMIT = 1\nname = 2",
    }
    found = {"Row": ["a.py", "b.py"], "Place": ["a.py", "b.py"], "Item": ["a.py", "c.py"], "Pair": ["a.py", "b.py"]}
    assert repeated(planted) == found


def repeated(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Find classes, type aliases and type variables whose names stand in several places, a leading underscore aside."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in texts.items():
        for name in (name for node in ast.walk(ast.parse(text)) for name in names_of(node)):
            places[name.lstrip("_")].append(path)
    return {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}


def names_of(node: ast.AST) -> list[str]:
    """Return names of classes, and of values named like them: others are ``lower_case`` or ``UPPER``."""
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    made = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func)
    return [
        target.id
        for target in targets
        if isinstance(target, ast.Name) and (made in VARIABLES or re.match("_?[A-Z].*[a-z]", target.id))
    ]


def test_a_file_name_stands_three_times_at_most() -> None:
    names = Counter(path.name for path in sources() if not path.stem.startswith("__"))
    assert {name: number for name, number in names.items() if number > MOST_FILES} == {}


def sources() -> list[Path]:
    """The package's modules, each once."""
    folders = [path for name in SOURCES for path in (ROOT / name).rglob("*.py")]
    return [path for path in folders if path.resolve() == path]


def terms() -> dict[str, str]:
    """Terms of the glossary with their meanings; a row may define several."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", GLOSSARY.read_text(), re.MULTILINE)
    return {term: meaning for words, meaning in rows for term in words.split(", ")}


def test_each_term_of_the_glossary_has_one_row_and_one_meaning() -> None:
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| **")]
    words = Counter(re.sub(r"[*|]", "", line).split("  ")[0].strip().lower() for line in lines)
    assert len(terms()) >= len(lines) > 50
    assert [word for word, rows in words.items() if rows > 1] == []
    # A meaning per context ("at an agent: ...; in placements: ...") is two meanings.
    contexts = re.compile(
        r"(?:^|[.;] )(?:At|In|Of|With) (?:an? |the )?[\w ]+: .*[.;] (?:at|in|of|with) [\w ]+:", re.IGNORECASE
    )
    assert {term: meaning for term, meaning in terms().items() if contexts.search(meaning)} == {}


def test_terms_of_the_glossary_are_used() -> None:
    documents = [path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if path != GLOSSARY]
    texts = [*(path.read_text() for path in documents if path.name != "CHANGELOG.md")]
    texts = [*map(prose_of_markdown, texts), *(prose_of_python(path.read_text()) for path in sources())]
    text = " ".join(" ".join(texts).split()).lower()
    uses = {term: len(re.findall(rf"(?<!\w){re.escape(term.lower())}(?:s|es)?(?!\w)", text)) for term in terms()}
    assert {term: number for term, number in uses.items() if number < LEAST_USES} == {}
