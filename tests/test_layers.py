"""Imports go downward: mathematics, things, procedures, edges. Heavy packages have one home each."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "pluralign"

LAYERS = {
    "ground": "errors files options hub jsonable processes",
    "mathematics": "differences calibration simplex social_choice policies rankings bradley_terry extremes theory "
    "bert surface traits diversity costs",
    "things": "preferences tournaments comparisons shapes records known_sets sources demo "
    "vectorcache encoders precision models tuned members pairs ensemble featurestore evidence candidates steps",
    "procedures": "inspection stagewise joint hidden baselines subjects groups evaluation pairtrainer finetune fitting "
    "pruning certification choices profiles pluralism study showcase streaming shards walkthrough rehearsal",
    "edges": "terminal figures reporting model_card exporting scaling servers generation policysamples tuning "
    "gate batching bodies chat service serving reproduction commandline cli",
    "fronts": "__init__ __main__",
}
HOMES = {
    "typer": {"cli", "commandline"},
    "rich": {"commandline", "terminal"},
    "datasets": {"records", "sources"},
    "huggingface_hub": {"hub"},
    "sentence_transformers": {"encoders"},
    "transformers": {"encoders", "models", "generation", "tuned", "pairtrainer", "finetune"},
    "torch": {
        *("processes", "bert", "encoders", "models", "generation", "exporting", "tuned", "pairtrainer", "finetune"),
        *("policysamples", "tuning", "precision"),
    },
    "peft": {"tuned", "finetune"},
    "accelerate": {"pairtrainer", "finetune", "processes"},
    "pytorch_optimizer": {"pairtrainer"},
    "matplotlib": {"figures", "reporting"},
    "jinja2": {"reporting", "model_card"},
    "fastapi": {"serving"},
    "uvicorn": {"serving"},
    "prometheus_client": {"serving"},
    "openai": {"servers"},
    "trl": {"tuning"},
    "safetensors": {"bert", "encoders", "ensemble", "evidence", "steps", "exporting"},
    "tokenizers": {"bert"},
    "ray": {"scaling"},
    "vaderSentiment": {"traits"},
}
RANK = {module: rank for rank, modules in enumerate(LAYERS.values()) for module in modules.split()}


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "pluralign"}
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    here = module_of(path)
    assert here in RANK, f"give {here} a layer"
    for name in imports_of(path):
        there = name.split(".")[1] if name.startswith("pluralign.") else None
        if there in RANK and here not in LAYERS["fronts"].split():
            assert RANK[there] <= RANK[here], f"{here} must not import {there}, which is above it"
            assert there != "cli", "nobody imports the command line"


def test_no_two_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        targets = {name.split(".")[1] for name in imports_of(path) if name.startswith("pluralign.")}
        graph.setdefault(module_of(path), set()).update(target for target in targets if target in RANK)
    done: set[str] = {"__init__", "__main__"}
    while ready := {module for module, needs in graph.items() if module not in done and needs - {module} <= done}:
        done |= ready
    assert done >= set(graph), f"these import each other in a circle: {sorted(set(graph) - done)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_stay_in_their_home(path: Path) -> None:
    for name in imports_of(path):
        if (home := HOMES.get(name.split(".")[0])) is not None:
            assert module_of(path) in home, f"{name} belongs in {home or 'no module yet'}"


@pytest.mark.parametrize("statement", ["import pluralign", "from pluralign.cli.main import app"])
def test_importing_and_help_load_nothing_heavy(statement: str) -> None:
    code = f"{statement}; import sys; print([m for m in ('torch', 'numpy', 'pyarrow', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_public_name_resolves() -> None:
    import pluralign

    for name in pluralign.__all__:
        assert getattr(pluralign, name) is not None
    assert set(pluralign._HOMES) | {"__version__"} == set(pluralign.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pluralign.nothing
