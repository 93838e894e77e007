"""Links, packages list and disk agree, and the rules about size and imports hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("callbacks", "conf", "strategies")
PLUGINS = "hydra_plugins"
"""A namespace package at the root, as Hydra wants it."""
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 50


def tracked() -> list[Path]:
    """Files under version control, or to be: real ones, each once."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
    paths = (ROOT / line for line in listing.splitlines())
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", LINKED)
def test_root_folders_are_linked_into_the_package(name: str) -> None:
    link = ROOT / "unicron_lightning" / name
    assert (ROOT / name / "__init__.py").is_file()
    # A checkout without links (a zip, Windows) has a file with the target's name in it instead.
    assert (link.is_symlink() and str(link.readlink()) == f"../{name}") or link.read_text() == f"../{name}"


def test_packages_list_is_what_is_on_disk(project: dict) -> None:
    folders = {path.parent.relative_to(ROOT) for path in tracked() if path.suffix == ".py"}
    on_disk = {
        ".".join(folder.parts if folder.parts[0] == "unicron_lightning" else ("unicron_lightning", *folder.parts))
        for folder in folders
        if folder.parts and folder.parts[0] in ("unicron_lightning", *LINKED)
    }
    listed = project["tool"]["setuptools"]["packages"]
    plugins = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / PLUGINS).glob("*/__init__.py")}
    assert sorted(listed) == sorted(on_disk | plugins | {PLUGINS})
    assert set(project["tool"]["setuptools"]["package-dir"]) == {
        "unicron_lightning",
        PLUGINS,
        *(f"unicron_lightning.{name}" for name in LINKED),
    }


def test_the_namespace_of_hydras_plugins_is_nobodys() -> None:
    assert [path.name for path in (ROOT / PLUGINS).iterdir() if path.is_file()] == []


def test_every_data_file_of_the_package_is_packaged(project: dict) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]
    missing = []
    for path in tracked():
        relative = path.relative_to(ROOT)
        if path.suffix == ".py" or relative.parts[0] not in ("unicron_lightning", *LINKED):
            continue
        package, root = _package_of(relative)
        if not any(path in root.glob(pattern) for pattern in patterns.get(package, [])):
            missing.append(str(relative))
    assert missing == []


def _package_of(relative: Path) -> tuple[str, Path]:
    """The package to whose data a file belongs, and that package's folder."""
    top = relative.parts[0]
    if top in LINKED:
        return f"unicron_lightning.{top}", ROOT / top
    return ".".join(relative.parts[:-1]), ROOT / relative.parent


def python_files() -> list[Path]:
    """All tracked Python sources."""
    return [path for path in tracked() if path.suffix == ".py"]


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {_body_lines(node)} lines"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _body_lines(node) > MAX_FUNCTION_LINES
    ]
    assert too_long == []


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, the docstring not counted."""
    body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1


def test_linked_folders_are_never_imported_at_top_level() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if _imported_tops(node) & set(LINKED)
    ]
    assert wrong == []


def _imported_tops(node: ast.AST) -> set[str]:
    """Top-level names that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return {(node.module or "").partition(".")[0]}
    return set()


def test_no_paths_of_this_machine() -> None:
    # Outside a virtual environment sys.prefix is /usr or the like, which scripts name rightly.
    places = [str(ROOT), *([sys.prefix] if sys.prefix != sys.base_prefix else [])]
    pattern = re.compile("|".join([*(re.escape(place) + r"\b" for place in places), r"/home/\w+/", r"/Users/\w+/"]))
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # pictures
            continue
        found += [f"{path.relative_to(ROOT)}: {match}" for match in pattern.findall(text)]
    assert found == []


def test_every_import_of_the_package_is_a_declared_dependency(project: dict) -> None:
    extras = project["project"]["optional-dependencies"]
    optional = [item for name in ("demo", "megatron", "safetensors", "simulate") for item in extras[name]]
    wanted = [*project["project"]["dependencies"], *optional]
    # Distributions are named like the modules they provide, except for this one.
    declared = {_normal(re.match(r"[\w.-]+", item).group()).removesuffix("-core").replace("-", "_") for item in wanted}
    imported = {
        top
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in ("unicron_lightning", *LINKED)
        for node in ast.walk(ast.parse(path.read_text()))
        for top in _imported_tops(node)
    }
    assert imported - declared - sys.stdlib_module_names - {"unicron_lightning"} == set()


def test_constraints_pin_every_dependency_exactly(project: dict) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.partition(";")[0].split("==") for line in lines if line and not line.startswith("#"))
    pinned = {_normal(name) for name in pins}
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["dev"], *extras["megatron"]]
    names = {_normal(re.match(r"[\w.-]+", item).group()) for item in wanted}
    assert names - pinned - {"unicron-lightning"} == set()
    assert not any("+" in version for version in pins.values()), "a local version cannot be had elsewhere"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_actions_of_workflows_are_pinned_by_commits() -> None:
    lines = [
        line.strip() for path in (ROOT / ".github").glob("workflows/*.yml") for line in path.read_text().splitlines()
    ]
    used = [line for line in lines if re.match(r"(- )?uses:", line)]
    assert len(used) > 10
    assert [line for line in used if not re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


def test_a_citation_names_this_version(project: dict) -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {project['project']['version']}" in lines
