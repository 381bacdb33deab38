"""Old names work for one release, with a warning that says the new one."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

import jaxspec
from jaxspec import _deprecated

OLD_MODULES = [
    *_deprecated.MODULES,
    "jaxspec.families.base",
    "jaxspec.storage.saving",
    "jaxspec.storage.bridge",
    "jaxspec.storage.conversion",
    "jaxspec.grammars.tables",
    "jaxspec.chat.template",
]


@pytest.mark.parametrize("module", OLD_MODULES)
def test_an_old_module_has_the_names_of_the_new_one(module: str) -> None:
    new = _deprecated.new_name(module)
    assert new is not None
    for name in [n for n in sys.modules if n == module]:
        del sys.modules[name]
    with warnings.catch_warnings():  # of its package, which is imported before it
        warnings.simplefilter("ignore")
        importlib.import_module(module.rpartition(".")[0])
    with pytest.warns(DeprecationWarning, match=f"{module} is now {new};"):
        old = importlib.import_module(module)
    of_new = importlib.import_module(new)
    public = [name for name in vars(of_new) if not name.startswith("_")]
    assert public
    for name in public:
        assert getattr(old, name) is getattr(of_new, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in _deprecated.NAMES.items() for name in names],
)
def test_an_old_name_is_the_new_one(module: str, name: str) -> None:
    home, _, attribute = _deprecated.NAMES[module][name].rpartition(".")
    expected = getattr(importlib.import_module(home), attribute)
    with warnings.catch_warnings():  # of the module, which may be an old one
        warnings.simplefilter("ignore")
        old = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now "):
        assert getattr(old, name) is expected


@pytest.mark.parametrize("name", jaxspec.__all__)
def test_every_public_name_is_there(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(jaxspec, name) is not None


def test_the_warning_points_at_the_line_that_uses_the_old_name() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _ = jaxspec.Extras  # pyright: ignore[reportAttributeAccessIssue]
    assert [w.filename for w in caught] == [__file__]


def test_old_keywords_are_passed_on_by_their_new_names() -> None:
    @_deprecated.renamed_keywords(extras="program_features")
    def function(*, program_features: int = 0) -> int:
        return program_features

    with pytest.warns(DeprecationWarning, match="extras= is now program_features="):
        assert function(extras=3) == 3  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="extras is the old name of program_features"):
        function(extras=3, program_features=3)  # pyright: ignore[reportCallIssue]
    assert function(program_features=2) == 2


def test_old_keywords_and_attributes_of_the_library_work() -> None:
    pair = jaxspec.load()
    with pytest.warns(DeprecationWarning, match="LoadedModel.graph is now"):
        assert pair.target.graph is pair.target.model_def
    with pytest.warns(DeprecationWarning, match="extras= is now program_features="):
        sampler = jaxspec.Sampler(pair, max_new_tokens=2, extras=jaxspec.ProgramFeatures())  # pyright: ignore[reportCallIssue]
    with pytest.warns(DeprecationWarning, match="extras= is now program_features="):
        engine = jaxspec.Engine(*pair, cache_length=64, extras=jaxspec.ProgramFeatures())  # pyright: ignore[reportCallIssue]
    assert isinstance(sampler, jaxspec.Sampler)
    assert engine.spec.program_features == jaxspec.ProgramFeatures()


def test_a_name_that_never_was_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'jaxspec' has no attribute 'nothing'"):
        _ = jaxspec.nothing  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'jaxspec\.nothing'"):
        importlib.import_module("jaxspec.nothing")


def test_old_imports_work_in_a_program() -> None:
    program = (
        "from jaxspec.records import Sampling, FieldError\n"
        "from jaxspec.storage.saving import save\n"
        "from jaxspec.engine import Engine\n"
        "from jaxspec import trees, Extras\n"
        "import jaxspec\n"
        "assert Sampling is jaxspec.Sampling and Engine is jaxspec.Engine and save is jaxspec.save\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", program], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("DeprecationWarning") >= 5
