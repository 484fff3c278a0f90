"""How the compiler's files are laid out: one name, one class; one idea, one file. (Who imports whom is import-linter's.)"""

import ast
import collections
import pathlib

import rlfx.recurrence

FILES = sorted(pathlib.Path(rlfx.recurrence.__path__[0]).rglob("*.py"))


def test_no_two_classes_have_one_name():
    places = collections.defaultdict(list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file.name)
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_files_hold_one_idea():
    assert {file.name: n for file in FILES if (n := len(file.read_text().splitlines())) > 400} == {}


def test_no_import_waits_inside_of_a_function():
    """Such an import hides a circle. (A type may be imported for the checker alone, at the top.)"""
    hidden = [
        (file.name, node.lineno)
        for file in FILES
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom | ast.Import) and "rlfx" in ast.unparse(node)
    ]
    assert hidden == []
