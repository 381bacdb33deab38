"""What is promised about the packages as such: metadata, wheel contents, who may import whom."""

from __future__ import annotations

import ast
import graphlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import jax
import pytest
from packaging.specifiers import SpecifierSet

import jaxspec
from jaxspec import sampling

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxspec", "pallas_kernels", "checkpoints_convert")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_version_is_that_of_the_distribution():
    try:
        installed = metadata.version("jaxspec-decoding")
    except metadata.PackageNotFoundError:
        pytest.skip("not installed: running from the source tree")
    assert installed == jaxspec.__version__


@pytest.mark.parametrize(
    ("version", "allowed"),
    [
        ("0.10.1", False),
        ("0.10.2", True),
        ("0.11.0", False),
        ("0.11.1", False),
        ("0.11.2", True),
        ("0.12.0.1", True),
        ("0.13.0", False),
        (jax.__version__, True),
    ],
)
def test_jax_versions(version: str, allowed: bool):
    (requirement,) = (d for d in PROJECT["dependencies"] if re.match(r"jax\W", d))
    assert (version in SpecifierSet(requirement.removeprefix("jax"))) is allowed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build in a copy: setuptools would leave a build folder, and reuse what is stale in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "tests", "examples", "scripts"):
        shutil.copytree(ROOT / name, source / name)
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run(
        [sys.executable, *command, "--wheel-dir", str(out), str(source)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: zipfile.ZipFile):
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"jaxspec/py.typed", "jaxspec/bundled/target/model.safetensors"} <= expected
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile):
    info = f"jaxspec_decoding-{jaxspec.__version__}.dist-info"
    assert "jaxspec = jaxspec.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_files_that_a_document_names_exist(document: str):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"(?:jaxspec|tests|examples|scripts|pallas_kernels)/[\w./]*\w", text)
    for tree in re.findall(r"```\n(jaxspec/\n.*?)```", text, flags=re.DOTALL):
        folder = ""
        for line in tree.splitlines():
            names = re.findall(r"\w+(?:\.py|/)(?=,?\s|$)", line.strip().split("  ")[0])
            if line.startswith(" "):
                named += [folder + name for name in names]
            else:
                folder = names[0]
                named += names
    assert [name for name in named if not (ROOT / name).exists()] == []


# --- who imports whom ----------------------------------------------------------------------------


def _imports(path: Path, *, at_import_only: bool = False) -> set[str]:
    """Return the absolute names of all modules a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif at_import_only and isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        stack.extend(ast.iter_child_nodes(node))
    return found


def _importers(package: str, forbidden: str, **kwargs: bool) -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / package).rglob("*.py"))
        if any(re.match(rf"({forbidden})(\.|$)", name) for name in _imports(path, **kwargs))
    ]


def test_kernels_need_nothing_of_ours():
    assert _importers("pallas_kernels", "jaxspec|checkpoints_convert") == []


def test_torch_is_never_needed():
    assert _importers("jaxspec", "torch") == []
    assert _importers("checkpoints_convert", "torch", at_import_only=True) == []


def test_imports_flow_one_way():
    """Conversion knows tensors and tables, and nothing of jaxspec but how to start its command."""
    assert _importers("checkpoints_convert", "jaxspec") == ["checkpoints_convert/__main__.py"]
    for library in ("registry", "weights", "configs", "models", "drafters"):
        assert _importers(f"jaxspec/{library}", r"jaxspec\.(commands|api|engine|rollout)") == []
    for below in ("configs", "models", "drafters"):
        assert _importers(f"jaxspec/{below}", r"jaxspec\.(registry|weights\.loading)") == []
    at_import = {"at_import_only": True}
    assert _importers("jaxspec/registry", r"jaxspec\.(models|drafters)", **at_import) == []


# Top first: a file imports from its own layer and from those below, also what it imports for types alone. An
# entry is a module or a package; the longest that fits counts.
LAYERS = """
jaxspec.__main__ checkpoints_convert.__main__
jaxspec.commands
jaxspec
jaxspec.serving jaxspec.training
jaxspec.api jaxspec.plots
jaxspec.engine jaxspec.rollout
jaxspec.runtime
jaxspec.decode_loop jaxspec.mixed_step
jaxspec.decode jaxspec.row_subset jaxspec.constraint
jaxspec.state
jaxspec.drafters
jaxspec.models
jaxspec.weights
jaxspec.registry
jaxspec.weights.model_def jaxspec.weights.sharding jaxspec.weights.trees
jaxspec.quantised
jaxspec.text jaxspec.tokenizer
jaxspec.verify
jaxspec.sampling
jaxspec.cache jaxspec.mesh
jaxspec.configs jaxspec.options
pallas_kernels checkpoints_convert
jaxspec.shapes jaxspec.version jaxspec._deprecated
"""
RANK = {name: rank for rank, layer in enumerate(LAYERS.split("\n")) for name in layer.split()}

# Imports upward, each for a reason.
UPWARD = {
    # A family imports its module when it is asked for it.
    ("jaxspec.registry.dflash", "jaxspec.drafters.dflash"),
    ("jaxspec.registry.dflash2", "jaxspec.drafters.dflash2"),
    ("jaxspec.registry.dspark", "jaxspec.drafters.dspark"),
    ("jaxspec.registry.ngram", "jaxspec.drafters.ngram"),
    ("jaxspec.registry.gemma4", "jaxspec.models.gemma4"),
    ("jaxspec.registry.gemma4_vision", "jaxspec.models.gemma4_vision"),
    ("jaxspec.registry.mtp", "jaxspec.drafters.mtp"),
    ("jaxspec.registry.qwen3", "jaxspec.models.qwen3"),
}


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports, for types too."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {m if m in modules else node.module for m in members}
        found[name] = (found[name] & modules.keys()) - {name}
    return found


def _rank(module: str) -> int:
    entry = module
    while entry not in RANK or (entry == "jaxspec" != module):
        entry = entry.rpartition(".")[0]
        assert entry, f"{module} is in no layer"
    return RANK[entry]


def test_imports_go_down(arrows: dict[str, set[str]]):
    up = {(a, b) for a, imported in arrows.items() for b in imported if _rank(b) < _rank(a)}
    assert up == UPWARD


def test_imports_make_no_circle(arrows: dict[str, set[str]]):
    graph = {a: {b for b in bs if (a, b) not in UPWARD} for a, bs in arrows.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises with the circle


def test_only_weights_and_the_registry_reach_conversion():
    """A family imports its table of rules, and only when it is asked for it.

    The tokenizer reads files of a checkpoint too, with what reads small files.
    """
    reach = {"jaxspec/weights", "jaxspec/registry"}
    conversion = r"checkpoints_convert(?!\.(files|errors))"
    found = _importers("jaxspec", conversion, at_import_only=True)
    found += _importers("jaxspec", conversion)
    places = {
        str(path.parent if path.parent.name != "jaxspec" else path) for path in map(Path, found)
    }
    assert places <= reach


def test_nobody_asks_for_the_class_of_a_config():
    """What depends on the kind of a model is in its family's entry."""
    for path in sorted((ROOT / "jaxspec").rglob("*.py")):
        if "registry" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                assert not re.search(r"\w+Config\b", ast.unparse(node)), f"{path}:{node.lineno}"
            if isinstance(node, ast.Compare):
                assert not re.search(r"['\"](mtp|dflash)['\"]", ast.unparse(node)), (
                    f"{path}:{node.lineno}"
                )


@pytest.mark.parametrize("module", ["cache", "sampling", "verify"])
def test_arrays_only(module: str):
    """These know no model, drafter or engine, so that they can be read and tested alone."""
    ours = {n for n in _imports(ROOT / f"jaxspec/{module}.py") if n.startswith("jaxspec.")}
    allowed = {"jaxspec.shapes", "jaxspec.options", "jaxspec.mesh", "jaxspec.sampling"}
    assert {".".join(n.split(".")[:2]) for n in ours} <= {
        ".".join(n.split(".")[:2]) for n in allowed
    }


@pytest.mark.parametrize(
    "module", ["decode", "decode_loop", "mixed_step", "engine/engine", "verify"]
)
def test_the_loop_knows_no_drafter_by_name(module: str):
    tree = ast.parse((ROOT / f"jaxspec/{module}.py").read_text(encoding="utf-8"))
    code = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    code |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    code |= _imports(ROOT / f"jaxspec/{module}.py")
    assert [name for name in code if "dflash" in name.lower()] == [], module


def test_types_and_shapes_are_checked_under_the_tests():
    """By beartype alone where no shape is named, and with a scope for the names of sizes where one is."""
    with pytest.raises(TypeError, match="prompt_ids"):
        jaxspec.Request(prompt_ids="ab", max_new_tokens=[])  # pyright: ignore[reportArgumentType]
    logits, params = jax.numpy.ones((2, 8)), sampling.SamplingParams.make(3)
    with pytest.raises(TypeError, match="B"):
        sampling.shape_logits(logits, params)
