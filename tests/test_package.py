"""The front of the package: light to import, and every public name resolves."""

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest


@pytest.mark.parametrize("statement", ["import pluralign", "from pluralign.cli.main import app"])
def test_importing_and_help_load_nothing_heavy(statement: str) -> None:
    heavy = ("torch", "numpy", "pyarrow", "datasets", "rich")
    code = f"{statement}; import sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_public_name_resolves() -> None:
    import pluralign

    for name in pluralign.__all__:
        assert getattr(pluralign, name) is not None
    assert set(pluralign._HOME_OF) | {"__version__"} == set(pluralign.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'evalute'; did you mean 'evaluate'\?"):
        _ = pluralign.evalute
    with pytest.raises(AttributeError, match=r"'pluralign\.theory' has no attribute 'kendal'"):
        _ = pluralign.theory.kendal  # type: ignore[attr-defined]


def test_rooms_are_attributes_and_load_nothing_before() -> None:
    code = (
        "import pluralign, sys; before = 'pluralign.theory' in sys.modules; "
        "print(before, pluralign.theory.kendall.__name__, pluralign.votes.__name__, 'theory' in dir(pluralign))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False pluralign.theory.kendall pluralign.votes True\n"


def test_the_signature_and_the_help_of_fit_show_every_option() -> None:
    import pluralign

    shown = inspect.signature(pluralign.fit).parameters
    text = inspect.getdoc(pluralign.fit) or ""
    for config in (pluralign.FitOptions, pluralign.FinetuneOptions):
        for option in fields(config):
            assert shown[option.name].default == option.default
            assert f"    {option.name}: {option.metadata['help'].split()[0]}" in text
    assert "changes" not in shown
    assert inspect.signature(pluralign.load_preferences).parameters["rename"].default == {}


@pytest.mark.parametrize(
    ("module", "name", "package", "extra"),
    [("server.app", "create_app", "fastapi", "server"), ("publishing.report", "report", "jinja2", "report")],
)
def test_a_function_whose_packages_are_missing_names_its_extra(
    module: str, name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pluralign.core.errors import MissingExtraError
    from pluralign.core.late import late

    monkeypatch.delitem(sys.modules, f"pluralign.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pluralign\.{name} needs .*pip install 'pluralign\[{extra}\]'"):
        late(module, name)
