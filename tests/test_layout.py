"""The house keeps its shape: one name, seven linked folders, imports that only point down."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VIEW = ROOT / "src" / "metainfer"
FOLDERS = {"backends", "compiler", "hardware", "ir", "models", "passes", "runtime"}
MAY_IMPORT: dict[str, set[str]] = {
    "ir": set(),
    "hardware": {"ir"},
    "runtime": {"ir", "hardware", "backends"},
    "backends": {"ir", "hardware"},
    # Passes see kernels through their contract alone.
    "passes": {"ir", "hardware", "backends.kernel"},
    "models": {"ir"},
    "compiler": {"ir", "hardware", "models", "passes", "backends", "runtime"},
}
MOST_LINES = 520


def imported(path: Path) -> list[tuple[int, str]]:
    """Line and full name of every import of ours in a file."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [(node.lineno, n) for n in names if n.split(".")[0] == "metainfer"]
    return found


def is_allowed(name: str, folder: str) -> bool:
    inner = name.removeprefix("metainfer").lstrip(".")
    if not inner:
        return folder == "compiler"
    return any(inner == a or inner.startswith(f"{a}.") for a in MAY_IMPORT[folder] | {folder})


def test_links_match_folders() -> None:
    links = {path.name for path in VIEW.iterdir() if path.is_symlink()}
    assert links == FOLDERS
    assert all((VIEW / name).resolve() == ROOT / name for name in links)


def test_every_code_folder_is_a_package() -> None:
    """A folder without __init__.py would be silently missing from the wheel."""
    for name in sorted(FOLDERS):
        for module in (ROOT / name).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module.relative_to(ROOT)


def test_imports_only_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in MAY_IMPORT
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in imported(path)
        if not is_allowed(name, folder)
    ]
    assert not wrong, "\n".join(wrong)


def test_an_upward_import_is_seen() -> None:
    assert not is_allowed("metainfer.compiler.api", "ir")
    assert not is_allowed("metainfer.backends.registry", "passes")
    assert is_allowed("metainfer.backends.kernel", "passes")
    assert not is_allowed("metainfer.backends.kernels", "passes")


def test_no_file_hides_a_second_noun() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {count}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > MOST_LINES
    ]
    assert not long, "\n".join(long)


def test_bare_folders_are_not_installed() -> None:
    """`import ir` must mean nothing to a user of the package."""
    import importlib.metadata

    top = importlib.metadata.distribution("metainfer").read_text("top_level.txt")
    assert top is None or top.split() == ["metainfer"]
