# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, no circles, and nothing of the package longer than it may be.

Imports inside of functions count; those for type checkers alone do not.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm.junctions"
TOPS = (PACKAGE, "testbed", "benchmarks", "tools", "tests")
MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 40

# What each room of the package may import, besides itself. The modules on its top
# floor are rooms too.
_FLOOR = {"config", "errors", "version"}
MAY_IMPORT: Mapping[str, set[str]] = {
    "": {"errors", "version"},
    "version": set(),
    "errors": set(),
    "config": {"errors"},
    "seams": _FLOOR,
    "rules": {"errors"},
    "metrics": {"rules", *_FLOOR},
    "declared": {"metrics", "rules", "seams", *_FLOOR},
    "record": {"rules", "seams", *_FLOOR},
    "plan": {"record", "rules", *_FLOOR},
    "core": {"rules", "seams", *_FLOOR},
    "lookup": {"metrics", "rules", "seams", *_FLOOR},
    "store": {"core", "lookup", "metrics", "rules", "seams", *_FLOOR},
    "repairs": {"seams", *_FLOOR},
    "overlay": {"core", "declared", "record", "repairs", "seams", "store", *_FLOOR},
    "doctor": {"metrics", "overlay", "seams", "store", *_FLOOR},
}

Sources = Mapping[str, str]
Imports = Mapping[str, set[str]]


def sources() -> dict[str, str]:
    """Return the text of every module of the repository, by its name."""
    found = {}
    for top in TOPS:
        folder = ROOT / Path(*top.split("."))
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            # What is kept there goes into vLLM's tree.
            if parts[:3] != ("tools", "series", "new"):
                found[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return found


def imports(texts: Sources) -> dict[str, set[str]]:
    """Return for each module the others of these that it imports."""
    return {
        module: {
            other
            for name in _imported_names(ast.parse(text))
            if (other := _module_of(name, texts)) not in ("", module)
        }
        for module, text in texts.items()
    }


def _imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports name their module in full"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in children:
        yield from _imported_names(child)


def _module_of(name: str, texts: Sources) -> str:
    """Return the module that a dotted name is, or is in; "" for one of others."""
    while name and name not in texts:
        name = name.rpartition(".")[0]
    return name


def circles(graph: Imports) -> list[str]:
    """Return circles of modules that import one another, each as one line."""
    found: list[str] = []
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(graph[module]):
                walk(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        walk(module, [])
    return found


def wrong_ways(graph: Imports) -> list[str]:
    """Return the imports between rooms of the package that go up or aside."""
    found = []
    for module, others in sorted(graph.items()):
        for other in sorted(others):
            if _is_ours(module) and not _may_import(_room(module), other):
                found.append(f"{module} imports {other}")
    return found


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def _may_import(room: str, other: str) -> bool:
    if not _is_ours(other):
        # Nothing of the package needs tests, tools or benchmarks.
        return False
    return _room(other) in {room, *MAY_IMPORT[room]}


def _room(module: str) -> str:
    room = module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]
    assert room in MAY_IMPORT, f"say in this table what {PACKAGE}.{room} may import"
    return room


def too_long(texts: Sources) -> list[str]:
    """Return modules and functions of the package that are longer than they may be."""
    found = []
    for module, text in texts.items():
        num_lines = text.count("\n")
        if num_lines > MAX_MODULE_LINES:
            found.append(f"{module} has {num_lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    found.append(f"{module}.{node.name} has {num_lines} lines")
    return found


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return sources()


def test_the_package_imports_downwards_only(texts: Sources) -> None:
    assert wrong_ways(imports(texts)) == []


def test_no_modules_import_one_another(texts: Sources) -> None:
    assert circles(imports(texts)) == []


def test_modules_and_functions_of_the_package_are_short(texts: Sources) -> None:
    ours = {name: text for name, text in texts.items() if _is_ours(name)}
    assert too_long(ours) == []


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        (
            "rules.tails",
            "from vllm.junctions.store.worker import JunctionStoreWorker",
            "rules.tails imports vllm.junctions.store.worker",
        ),
        (
            "lookup.explain",
            "def late():\n    import vllm.junctions.store.coordinator",
            "lookup.explain imports vllm.junctions.store.coordinator",
        ),
        (
            "repairs.loads_wait",
            "from vllm.junctions.core import managers",
            "repairs.loads_wait imports vllm.junctions.core.managers",
        ),
        (
            "seams.switches",
            "from testbed import box",
            "seams.switches imports testbed.box",
        ),
    ],
)
def test_an_import_upwards_is_found(
    texts: Sources, module: str, line: str, wrong: str
) -> None:
    name = f"{PACKAGE}.{module}"
    planted = {**texts, name: f"{texts[name]}\n{line}\n"}
    assert wrong_ways(imports(planted)) == [f"{PACKAGE}.{wrong}"]


def test_an_import_for_type_checkers_alone_is_none(texts: Sources) -> None:
    name = f"{PACKAGE}.rules.tails"
    line = "if TYPE_CHECKING:\n    from vllm.junctions.store import worker\n"
    planted = {**texts, name: f"{texts[name]}\n{line}"}
    assert imports(planted) == imports(texts)


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("benchmarks.demo_result", "benchmarks.seed_table"),
        ("testbed.box.environment", "testbed.box.config"),
    ],
)
def test_a_circle_is_found_by_all_that_are_on_it(
    texts: Sources, module: str, other: str
) -> None:
    line = f"def late():\n    import {other}\n"
    planted = {**texts, module: f"{texts[module]}\n{line}"}
    found = circles(imports(planted))
    assert found
    assert all(module in circle and other in circle for circle in found)


def test_what_grows_too_long_is_found(texts: Sources) -> None:
    name = f"{PACKAGE}.errors"
    body = "    pass\n" * MAX_FUNCTION_LINES
    planted = {name: texts[name] + f"def long():\n{body}"}
    assert too_long(planted) == [f"{name}.long has {MAX_FUNCTION_LINES + 1} lines"]
    planted = {name: "\n" * (MAX_MODULE_LINES + 1)}
    assert too_long(planted) == [f"{name} has {MAX_MODULE_LINES + 1} lines"]
