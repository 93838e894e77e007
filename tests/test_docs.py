"""Names in documents exist (linked files, make targets, modules, console commands, options); prose is plain English."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prose import PER, idioms, prose_of_markdown, prose_of_python, rate

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`|^    (.+)$", re.MULTILINE)


PROSE_FOLDERS = ("unicron_lightning", "strategies", "callbacks", "hydra_plugins", "benchmarks", "examples", "tests")
MOST_IDIOMS = 12
"""Idioms per 10,000 words of the docstrings and comments in a folder."""
MOST_IDIOMS_OF_A_DOCUMENT = 20


def read(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def code_of(document: Path) -> list[str]:
    """Inline code and code blocks, one entry per line, without comments."""
    text = read(document)
    fenced = [line for block in FENCE.findall(text) for line in block.splitlines()[1:-1]]
    inline = [first or second for first, second in CODE.findall(FENCE.sub("", text))]
    return [line.partition(" #")[0].strip() for line in [*fenced, *inline]]


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", read(document))):
        if re.match(r"[a-z]+:", target):  # the network is not queried
            continue
        name, _, fragment = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        inside = path.exists() and path.is_relative_to(ROOT)
        if not inside or (fragment and fragment not in map(anchor, HEADING.findall(read(path)))):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_are_plain_english(document: Path) -> None:
    text = prose_of_markdown(read(document))
    found = idioms(text)
    allowed = max(1, MOST_IDIOMS_OF_A_DOCUMENT * len(text.split()) // PER)
    assert len(found) <= allowed, f"CONTRIBUTING.md, Prose: at most {allowed} in this document, not {found}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells(document: Path) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", re.sub(r"`[^`\n]*`", "code", FENCE.sub("", read(document))), re.MULTILINE)
    uneven = [table for table in tables if len({row.count("|") for row in table.splitlines()}) > 1]
    assert uneven == []


@pytest.mark.parametrize("folder", PROSE_FOLDERS)
def test_docstrings_and_comments_are_plain_english(folder: str) -> None:
    texts = {path: prose_of_python(read(path)) for path in (ROOT / folder).rglob("*.py") if not path.is_symlink()}
    found = {path: idioms(text) for path, text in texts.items()}
    share = rate(sum(map(len, found.values())), sum(len(text.split()) for text in texts.values()))
    worst = {str(path.relative_to(ROOT)): found[path] for path in sorted(found, key=lambda path: -len(found[path]))[:3]}
    assert share <= MOST_IDIOMS, f"CONTRIBUTING.md, Prose: {share:.0f} per {PER} words; most in {worst}"


def test_idioms_are_found_in_prose_and_not_in_code() -> None:
    module = 'x = "tells"  # a rank tells\nclass A:\n    y: int\n    """What nobody says."""\n'
    assert idioms(prose_of_markdown("`tells` and [told](told.md)\n\n    unicron tell\n")) == [
        "'told' (report, send, notify)"
    ]
    assert len(idioms(prose_of_python(module))) == 3
    assert rate(2, 1000) == 20.0


def test_entries_of_the_changelog_stand_once() -> None:
    begins = [line[:34] for line in read(ROOT / "CHANGELOG.md").splitlines() if line.startswith("- ")]
    repeated = sorted({begin for begin in begins if begins.count(begin) > 1})
    assert repeated == [], "a merge has brought back entries that were rewritten: keep the later ones"


def test_each_decision_has_a_number_of_its_own() -> None:
    numbers = [int(path.name[:4]) for path in (ROOT / "docs" / "decisions").glob("*.md")]
    assert len(numbers) == len(set(numbers))


def test_make_targets_exist() -> None:
    rules = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (document.name, target)
        for document in DOCUMENTS
        for line in code_of(document)
        if line.startswith("make ")
        for target in re.findall(r" ([a-z][\w-]*)(?![\w=-])", line)
    }
    assert {pair for pair in named if pair[1] not in rules} == set()


def test_modules_that_are_run_exist() -> None:
    texts = [*(read(document) for document in DOCUMENTS), *(ROOT / name for name in ("Makefile", ".ci/wheel-check"))]
    joined = "\n".join(text if isinstance(text, str) else text.read_text() for text in texts)
    modules = set(re.findall(r"-m (unicron_lightning[\w.]*\w)", joined))
    assert modules
    missing = set()
    for module in modules:
        spec = importlib.util.find_spec(module)
        if spec is None or (spec.submodule_search_locations and importlib.util.find_spec(f"{module}.__main__") is None):
            missing.add(module)
    assert missing == set()


def test_scripts_that_make_runs_exist() -> None:
    scripts = re.findall(r"(?:python|PYTHON=\S+) (\S+\.py|\.ci/\S+)", (ROOT / "Makefile").read_text())
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_subcommands_of_unicron_exist() -> None:
    lines = [line for document in DOCUMENTS for line in code_of(document)]
    named = {match for line in lines for match in re.findall(r"^unicron (\w+)", line)}
    code = "from unicron_lightning.cli import main; import sys; sys.argv = ['unicron', '--help']; sys.exit(main())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert named
    assert {name for name in named if name not in result.stdout} == set()


def test_the_reference_lists_every_rendezvous_option() -> None:
    from unicron_lightning.agent.options import CONF_KEYS

    section = read(ROOT / "docs" / "reference.md").partition("## Options of an agent")[2].partition("\n#")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == sorted(CONF_KEYS)


def test_every_error_stands_in_the_drawn_tree() -> None:
    from unicron_lightning import errors

    assert errors.__doc__ is not None
    parents: dict[str, set[str]] = {}
    folders = (ROOT / name for name in ("unicron_lightning", "strategies", "callbacks", "conf"))
    for path in {path.resolve() for folder in folders for path in folder.rglob("*.py")}:
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.ClassDef):
                parents[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    family = {"UnicronError"}
    while more := {name for name, bases in parents.items() if bases & family} - family:
        family |= more
    assert sorted(name for name in family if not re.search(rf"\b{name}\b", errors.__doc__)) == []


def test_messages_of_troubleshooting_exist() -> None:
    sources = "".join(path.read_text() for path in ROOT.glob("unicron_lightning/**/*.py"))
    sources += "".join(path.read_text() for path in ROOT.glob("strategies/**/*.py"))
    rows = re.findall(r"^\| (`[^|]+`) [^|]*\|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 80
    assert [message for message in messages if message not in sources] == []


def test_every_warning_is_in_the_page_of_messages() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    events = {
        name
        for folder in (ROOT / "unicron_lightning", ROOT / "strategies", ROOT / "callbacks", ROOT / "hydra_plugins")
        for path in folder.rglob("*.py")
        for name in re.findall(r'logger\.(?:warning|error|exception)\(\s*"([a-z_]+)[ "]', path.read_text())
        if "simulate" not in path.parts
    }
    assert len(events) > 60
    assert sorted(name for name in events if f"`{name}" not in page) == []
