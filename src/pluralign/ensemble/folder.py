"""The folder of a saved ensemble. ``ensemble.json`` names every other file with its hash, and is written last.

Other files are named by their hashes, so a new ensemble overwrites no file of the old one: readers see the old ensemble
or the new one, at every moment. Decided here: names, hashes, the schema of the JSON, and which files are removed. What
the files hold is in ``ensemble`` and ``held_out``.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from pluralign.core.errors import DataError
from pluralign.core.files import atomic_write, locked
from pluralign.core.json_values import LARGEST, JsonObject, from_json
from pluralign.text.encoders import ENCODER_FOLDER
from pluralign.text.finetuned import BACKBONE_FOLDER, KIND

ENSEMBLE_FILE = "ensemble.json"
REPRESENTATION_FILE = "representation.json"
DESCRIPTIONS_FILE = "descriptions.json"
VOTES_FILE, REWARDS_FILE = "held_out.parquet", "held_out.safetensors"
OWN_NAMES = ("ensemble", "held_out", f"{BACKBONE_FOLDER}-", f"{ENCODER_FOLDER}-")
"""How the names of the files and folders begin that a save writes before ``ensemble.json``."""
FORMAT = "pluralign-ensemble"
FORMAT_VERSION = 4
REMEDY = "copy the folder again, or fit again"
GIVE_FOLDER = "give a folder written by pluralign fit"
PARTS = ("arrays", "files", "features", "weights", "temperature", "undecided", "choice_model", "facts")
_OWN_FILES = re.compile(r"(ensemble|held_out)-[0-9a-f]{16}\.(safetensors|parquet)")
_OWN_FOLDERS = re.compile(rf"({BACKBONE_FOLDER}|{ENCODER_FOLDER})-[0-9a-f]{{16}}")

Value = TypeVar("Value")


# --- hashes -----------------------------------------------------------------------------------------------------------


def sealed(values: Mapping[str, Any]) -> JsonObject:
    """Return a JSON object with the hash of its other values, whatever their order and layout.

    Example:
        >>> is_intact(sealed({"weights": [0.5, 0.5]})), is_intact(sealed({"k": 2}) | {"k": 3}), is_intact({"k": 2})
        (True, False, False)
    """
    return {**values, "sha256": _digest(values)}


def is_intact(values: Mapping[str, Any]) -> bool:
    """Return whether a JSON object has the hash of its other values."""
    return values.get("sha256") == _digest({name: value for name, value in values.items() if name != "sha256"})


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for everything else, NaN and too deep nesting included."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# --- writing ----------------------------------------------------------------------------------------------------------


def write_file(folder: Path, name: str, data: bytes) -> dict[str, str]:
    """Write a file whose name has a part of its hash, and return the entry that ``ensemble.json`` has for it."""
    digest = hashlib.sha256(data).hexdigest()
    file = f"{Path(name).stem}-{digest[:16]}{Path(name).suffix}"
    with atomic_write(folder / file) as partial:
        partial.write_bytes(data)
    return {"file": file, "sha256": digest}


def write_description(folder: Path, values: Mapping[str, Any]) -> None:
    """Write ``ensemble.json``: from now on readers see the new ensemble.

    Raises:
        DataError: the values are no ensemble that could be read back.
    """
    description = {"format": FORMAT, "format_version": FORMAT_VERSION, **values}
    if problem := problem_of(description):
        raise DataError(f"an ensemble cannot be saved: {problem}")
    _write_sealed(folder / ENSEMBLE_FILE, description)


def replace_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write another record of the fit into ``ensemble.json``."""
    with locked(folder):
        description = read_description(folder)
        write_description(folder, {**{part: description[part] for part in PARTS}, "facts": facts})


def _write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(sealed(values), indent=1, ensure_ascii=False, allow_nan=False)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def used_names(folder: Path) -> set[str]:
    """Return the names of the files and folders that belong to the ensemble in a folder; none if it has no ensemble.

    Raises:
        DataError: it cannot be read, so its files are not known.
    """
    if not (folder / ENSEMBLE_FILE).exists():
        return set()
    description = read_description(folder)
    names = {entry["file"] for entry in (description["arrays"], *description["files"].values())}
    if description["features"].get("kind") == KIND:
        names.add(description["features"]["models"])
    if description["features"].get("own"):
        names.add(description["features"]["encoder"])
    added = (folder / name for name in (REPRESENTATION_FILE, DESCRIPTIONS_FILE))
    return names | {path.name for path in added if path.is_file() and _is_of(path, description)}


def remove_unused(folder: Path, before: set[str]) -> None:
    """Remove the files of an earlier ensemble, and of saves that were interrupted. Other people's files stay.

    Args:
        folder: of the ensemble.
        before: names that belonged to the earlier ensemble. Interrupted saves leave names with hashes.
    """
    try:
        used = used_names(folder)
    except (DataError, OSError):
        return
    for path in folder.iterdir():
        if path.name in used or path.is_symlink():
            continue
        if path.is_file() and (path.name in before or _OWN_FILES.fullmatch(path.name)):
            path.unlink()
        elif path.is_dir() and (path.name in before or _OWN_FOLDERS.fullmatch(path.name)):
            shutil.rmtree(path)


def _is_of(path: Path, description: Mapping[str, Any]) -> bool:
    try:
        return bool(parse_json(path.read_bytes())["ensemble"] == description_hash(description))
    except (KeyError, TypeError, ValueError):
        return False


def description_hash(description: Mapping[str, Any]) -> str:
    """Return the identity of an ensemble: a hash of what its predictions depend on.

    That is the encoder, members, weights, temperature, undecided share and choice model.
    """
    parts = [description[name] for name in ("weights", "temperature", "undecided", "choice_model")]
    parts.append(description["features"].get("identity"))
    text = json.dumps((description["arrays"]["sha256"], *parts))
    return hashlib.sha256(text.encode()).hexdigest()


# --- reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def readable(path: Path, problem: str = "it is damaged", remedy: str = REMEDY) -> Iterator[None]:
    """Raise DataError for the errors of parsers and constructors that read a file inside the block."""
    try:
        yield
    except DataError:
        raise
    except (SafetensorError, AttributeError, LookupError, NotImplementedError, OSError, TypeError, ValueError):
        raise DataError(problem, file=str(path), remedy=remedy) from None


def read_consistently(folder: Path, read: Callable[[JsonObject], Value]) -> Value:
    """Return what ``read`` reads with a description; again if another process replaces the ensemble meanwhile."""
    while True:
        description = read_description(folder)
        try:
            return read(description)
        except DataError:
            if read_description(folder) == description:
                raise


def save_beside(folder: Path, name: str, value: Mapping[str, Any]) -> Path:
    """Write results about an ensemble into its folder, with a hash, and the hash of the ensemble they are about."""
    _write_sealed(folder / name, {"ensemble": description_hash(read_description(folder)), **value})
    return folder / name


def load_beside(folder: Path, name: str, kind: type[Value], remedy: str) -> Value | None:
    """Read results that ``save_beside`` wrote; None if there are none, or if they are about another fit.

    Args:
        folder: of the ensemble.
        name: of the file.
        kind: the dataclass of the results.
        remedy: of the error if the file is damaged.
    """
    path = folder / name
    if not path.is_file():
        return None
    about = description_hash(read_description(folder))
    with readable(path, "it cannot be read", remedy):
        value = parse_json(path.read_bytes())
        if value["ensemble"] != about:
            return None
        if not is_intact(value):
            raise ValueError("its hash differs")
        return from_json(kind, value)


def read_description(folder: Path) -> JsonObject:
    """Return the JSON of an ensemble, after checking its format, its hash and its values."""
    path = folder / ENSEMBLE_FILE
    if folder.is_file():
        remedy = f"give its folder, {folder.parent}" if folder.name == ENSEMBLE_FILE else GIVE_FOLDER
        raise DataError("it is a file, not the folder of an ensemble", file=str(folder), remedy=remedy)
    if not path.is_file():
        remedy = GIVE_FOLDER if folder.is_dir() else "check the path"
        raise DataError(f"it has no {ENSEMBLE_FILE}", file=str(folder), remedy=remedy)
    try:
        description = parse_json(path.read_bytes())
    except ValueError:
        raise DataError("it is not JSON", file=str(path), remedy=REMEDY) from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise DataError("it does not describe an ensemble", file=str(path), remedy=GIVE_FOLDER)
    if description.get("format_version") != FORMAT_VERSION:
        version = f"its format_version is {description.get('format_version')!r:.20}, not {FORMAT_VERSION}"
        raise DataError(version, file=str(path), remedy="use the version of pluralign that wrote it, or fit again")
    if problem := problem_of(description):
        raise DataError(problem, file=str(path), remedy=REMEDY)
    if not is_intact(description):
        raise DataError("it was changed after saving: its hash differs", file=str(path), remedy=REMEDY)
    return description


def read_file(folder: Path, entry: Mapping[str, Any]) -> bytes:
    """Return the contents of a file that ``ensemble.json`` names, after checking its hash."""
    path = folder / Path(entry["file"]).name
    if not path.is_file():
        raise DataError(f"{path.name} is missing", file=str(folder), remedy="copy the whole folder again")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise DataError(f"{path.name} was changed after saving: its hash differs", file=str(folder), remedy=REMEDY)
    return data


# --- the schema -------------------------------------------------------------------------------------------------------


def problem_of(description: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the values of a description, None if nothing is."""
    if missing := [name for name in PARTS if name not in description]:
        return f"it lacks {', '.join(missing)}"
    if not _is_entry(description["arrays"]):
        return "arrays must name a file and its hash"
    files = description["files"]
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        return "files must be an object of files with their hashes"
    if not isinstance(description["features"], dict) or not isinstance(description["facts"], dict):
        return "features and facts must be objects"
    weights = description["weights"]
    if not isinstance(weights, list) or not weights or not all(_is_number(w) and w >= 0 for w in weights):
        return "weights must be a list of numbers, none below 0"
    if not abs(math.fsum(weights) - 1) < 1e-6:
        return f"weights must sum to 1, not {math.fsum(weights):g}"
    if not (_is_number(description["temperature"]) and description["temperature"] > 0):
        return "temperature must be a number above 0"
    undecided = description["undecided"]
    if not (_is_number(undecided) and 0 <= undecided < 1):
        return "undecided must be a number from 0 to below 1"
    return None


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("file"), str) and isinstance(value.get("sha256"), str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
