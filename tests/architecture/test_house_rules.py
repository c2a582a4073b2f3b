"""House rules that no linter knows, held over the whole library. Each finding is a line "file:line what"."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import akv
import akv_testing
from akv import observe
from akv.settings_checks import is_section, setting_types
from akv.values.settings import ClientSettings

ROOTS = tuple(Path(package.__path__[0]) for package in (akv, akv_testing))
FILES = [path for root in ROOTS for path in sorted(root.rglob("*.py"))]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)


def trees() -> Iterator[tuple[Path, str, ast.Module]]:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        yield path, text, ast.parse(text)


def place(path: Path, line: int) -> str:
    root = next(root for root in ROOTS if path.is_relative_to(root))
    return f"{path.relative_to(root.parent)}:{line}"


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """A function's nodes without those of functions inside it."""
    todo = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.Lambda)):
            todo.extend(ast.iter_child_nodes(node))


def is_declaration(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Protocol's method: a docstring and an ellipsis."""
    return all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in function.body)


@pytest.mark.parametrize(
    ("names", "allowed"),
    [({"os.environ", "os.environb", "os.getenv"}, {ROOTS[0] / "settings.py"}), ({"time.sleep"}, set())],
)
def test_the_environment_is_read_in_settings_and_nobody_sleeps(names: set[str], allowed: set[Path]) -> None:
    found = []
    for path, _, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Attribute, ast.ImportFrom)):
                continue
            if isinstance(node, ast.Attribute):
                used = {ast.unparse(node)}
            else:
                used = {f"{node.module}.{name.name}" for name in node.names}
            if used & names and path not in allowed:
                found.append(place(path, node.lineno))
    assert found == []


def test_an_async_function_waits() -> None:
    found = [
        f"{place(path, node.lineno)} {node.name}"
        for path, _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("__") and not is_declaration(node)
        if not any(isinstance(part, WAITS) or getattr(part, "is_async", 0) for part in own_nodes(node))
    ]
    assert found == []


def test_functions_and_files_stay_short() -> None:
    long = [f"{place(path, 1)} {lines} lines" for path, text, _ in trees() if (lines := text.count("\n")) > 400]
    long += [
        f"{place(path, node.lineno)} {node.name} {length} lines"
        for path, _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and (length := (node.end_lineno or 0) - node.lineno + 1) > 60
    ]
    assert long == []


def test_the_library_does_not_import_its_own_front_door() -> None:
    """`from akv import Settings` inside akv would pass every layer contract, and tie every room to every other."""
    found = []
    for path, _, tree in trees():
        if not path.is_relative_to(ROOTS[0]) or path.is_relative_to(ROOTS[0] / "cli") or path == ROOTS[0] / "__init__.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "akv":
                found += [place(path, node.lineno) for name in node.names if not is_module(name.name)]
    assert found == []


def is_module(name: str) -> bool:
    return (ROOTS[0] / f"{name}.py").is_file() or (ROOTS[0] / name).is_dir()


def field_names(call: ast.Call, function: ast.AST) -> set[str | None]:
    """What a call of `emit` passes; `**who` counts if `who` is a dictionary written out in the same function, else as None."""
    literals = {
        target.id: node.value
        for node in own_nodes(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names: set[str | None] = set()
    for keyword in call.keywords:
        written = literals.get(ast.unparse(keyword.value)) if keyword.arg is None else None
        names |= {str(key.value) for key in written.keys if isinstance(key, ast.Constant)} if written else {keyword.arg}
    return names - {"error", "clock"}


def event_calls() -> Iterator[tuple[str, str, str, set[str | None]]]:
    """Every call of `emit` and `step`: its place, which of the two, the constant that it names, and its fields."""
    for path, _, tree in trees():
        for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
            for node in own_nodes(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in {"observe.emit", "observe.step", "emit", "step"}:
                    called = ast.unparse(node.func).removeprefix("observe.")
                    constant = ast.unparse(node.args[0]).removeprefix("observe.") if node.args else ""
                    yield place(path, node.lineno), called, constant, field_names(node, function)


def test_V1_every_emitted_event_and_field_stands_in_the_catalogue() -> None:
    found = []
    for where, called, constant, fields in event_calls():
        event = getattr(observe, constant, None)
        if not isinstance(event, observe.Event):
            found.append(f"{where} {constant} is no constant of akv.observe")
            continue
        if None in fields:
            found.append(f"{where} hides its fields behind **")
        found += [f"{where} {event.name} has no field {field}" for field in fields - {None} - set(event.fields)]
        if (called == "step") != ("phase" in event.fields):
            found.append(f"{where} {event.name} is {'no step' if called == 'step' else 'a step'}")
    assert found == []


def test_no_test_is_skipped() -> None:
    words = ("mark." + "skip", "mark." + "xfail", "import" + "orskip", "pytest." + "skip(", "pytest." + "xfail(")
    tests = Path(__file__).parents[1]
    texts = {str(path): path.read_text(encoding="utf-8") for path in sorted(tests.rglob("*.py"))}
    found = [path for path, text in texts.items() if any(word in text for word in words)]
    assert found == []


def test_every_setting_is_read_by_the_part_that_it_is_for() -> None:
    # A setting that is documented, checked and read by nothing is worse than none.
    own = {"settings.py", "settings_checks.py", "settings_sources.py"}
    read = {
        node.attr
        for path, _, tree in trees()
        if path.is_relative_to(ROOTS[0]) and path.name not in own and "config" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    # These are put into the environment of the store's client, by the one module that may do so.
    by_settings = {f"client.{name}" for name in ClientSettings.__struct_fields__} - {"client.capture_log"}
    names = [name for name, kind in setting_types() if not is_section(kind)]
    unread = [name for name in names if name.rpartition(".")[2] not in read and name not in by_settings]
    assert unread == []
