"""The shape of the code: one direction of imports (typed-only and in-function imports included), short files, reasons.

The layers are those of the architecture: a module may import modules of its own layer and of lower ones.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("refusion_train", "launchers", "data_tools")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

LAYERS = {
    "refusion_train": 0,
    "refusion_train.errors": 0,
    "refusion_train.config": 1,
    "refusion_train.layouts": 1,
    "refusion_train.sources": 1,
    "refusion_train.schedules": 1,
    "refusion_train.objective": 2,
    "refusion_train.plan": 2,
    "refusion_train.data": 3,
    "refusion_train.telemetry": 3,
    "refusion_train.hf": 0,
    "data_tools": 4,
    "refusion_train.convert": 4,
    "refusion_train.model": 5,
    "refusion_train.parallel": 6,
    "refusion_train.checkpoint": 7,
    "refusion_train.convert.export": 8,
    "refusion_train.convert.importer": 8,
    "refusion_train.convert.verify": 8,
    "refusion_train.train": 8,
    "launchers": 9,
    "refusion_train.cli": 10,
    "refusion_train.cli_data": 10,
    "refusion_train.cli_bench": 10,
    "refusion_train.cli_slurm": 10,
}
# Folder or module: what it must never import, at any depth of its own code.
FORBIDDEN = {
    "refusion_train.objective": ("torch", "megatron", "deepspeed"),
    "refusion_train.data": ("megatron", "deepspeed"),
    "refusion_train.data.tokenizer": ("torch",),
    "refusion_train.data.shards": ("torch",),
    "refusion_train.config": ("torch", "megatron", "deepspeed"),
    "refusion_train.plan": ("torch", "numpy", "megatron", "deepspeed"),
    "refusion_train.hf": ("megatron", "deepspeed", "refusion_train"),
    "refusion_train.convert": ("megatron", "deepspeed"),
    "data_tools": ("torch", "megatron", "deepspeed"),
    "launchers": ("megatron", "deepspeed"),
}
ONLY_IN = {"deepspeed": {"refusion_train/parallel"}, "megatron": {"refusion_train/model", "refusion_train/parallel"}}


def _module(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def _layer(module: str) -> int | None:
    while module:
        if module in LAYERS:
            return LAYERS[module]
        module = module.rpartition(".")[0]
    return None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file: Path) -> None:
    module = _module(file)
    own = _layer(module)
    assert own is not None, f"{module} belongs to no layer; add it to LAYERS"
    for line, name in _imports(file):
        if name.split(".")[0] in PACKAGES:
            other = _layer(name)
            assert other is not None and other <= own, f"{file.name}:{line} imports {name} from a higher layer"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_forbidden_imports(file: Path) -> None:
    module = _module(file)
    for line, name in _imports(file):
        top = name.split(".")[0]
        for owner, banned in FORBIDDEN.items():
            if module == owner or module.startswith(owner + "."):
                assert top not in banned, f"{file.name}:{line}: {owner} must not import {top}"
        if top in ONLY_IN:
            assert any(folder in str(file) for folder in ONLY_IN[top]), f"{file.name}:{line} imports {top}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_short_and_say_why(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= 500, f"{file} has {text.count(chr(10))} lines: split it by idea"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{file} does not say why it exists"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            assert node.msg is not None, f"{file}:{node.lineno} asserts without a message"


def test_packages_are_all_listed() -> None:
    """A folder of modules that the build does not list would be missing from an installed package."""
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {_module(file).rpartition(".")[0] if file.name != "__init__.py" else _module(file) for file in FILES}
    assert present <= listed
