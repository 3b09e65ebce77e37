"""The manifest of a folder of policies: settings, figures and how to serve the adapters, as typed values.

A manifest is written after each finished member. A later run with the same settings reads it, and tunes only the
members that it lacks. Other settings are refused.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.core.errors import DataError, UsageError
from pluralign.core.files import atomic_write
from pluralign.core.json_values import from_json, to_json
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import Settings
from pluralign.models.loading import reference_folder
from pluralign.policies.options import TuneOptions
from pluralign.votes.prompts import Prompt, PromptLike

MANIFEST_FILE = "manifest.json"
FORMAT = "pluralign-policies"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank (vllm/config/lora.py)."""


@dataclass(frozen=True)
class ExampleAnswer:
    """A held-out prompt with the first response of the base and of the policy, and their rewards."""

    prompt: str | list[dict[str, str]]
    """A text, or the messages of a chat."""
    before: str
    after: str
    reward_before: float
    reward_after: float


@dataclass(frozen=True)
class TunedPolicy:
    """One member's policy and its figures on held-out prompts; rewards are standardised."""

    member: int
    name: str
    weight: float
    path: str
    """Folder of the adapter, within the folder of the policies."""
    reward_before: float
    """Mean reward of the base's responses, by this member."""
    reward_after: float
    """Mean reward of the policy's responses, by this member."""
    interval: tuple[float, float]
    """95 % interval of after − before, bootstrapped over prompts."""
    improved: bool
    """Whether that interval lies above 0."""
    kl: float
    """KL to the base per response, in nats; see ``sampled_kl``."""
    kl_standard_error: float
    rewards: list[float]
    """Mean reward of the policy's responses, by every member of the ensemble."""
    tokens: float
    """Mean length of the policy's responses."""
    seconds: float
    samples: list[ExampleAnswer]


@dataclass(frozen=True)
class BaseRecord:
    """The base model, the prompts, and the figures of the base's responses."""

    base: str
    """Name of the base on a server: a hub id, or a local folder."""
    prompts: int
    """Number of training prompts."""
    held_out: int
    """Number of held-out prompts."""
    too_long: int
    """Number of prompts left out: together with a response they exceed the model's context."""
    scale: Mapping[str, list[float]]
    """``mean`` and ``spread`` that standardise each member's rewards; see ``reward_scale``."""
    base_rewards: list[float]
    """Mean standardised reward of the base's responses to held-out prompts, by every member."""
    base_tokens: float
    """Mean length of these responses."""


@dataclass(frozen=True)
class Serving:
    """How to serve the base and the adapters."""

    command: str
    """A vLLM command, to be run in the folder of the policies."""
    weights: Mapping[str, float]
    """Probability of drawing each adapter; they sum to 1."""


@dataclass(frozen=True)
class Manifest:
    """The state of a folder of policies."""

    settings: Settings
    """Everything that the policies depend on; see ``run_settings``."""
    members: tuple[TunedPolicy, ...] = ()
    """Finished members, in order."""
    base: BaseRecord | None = None
    serving: Serving | None = None
    pluralign: str = __version__

    def with_member(self, policy: TunedPolicy, lora_rank: int) -> "Manifest":
        """Return the manifest with one more finished member."""
        assert self.base is not None  # noqa: S101 - the base is sampled before any member is tuned
        members = tuple(sorted([*self.members, policy], key=lambda known: known.member))
        return replace(self, members=members, serving=serving(self.base.base, lora_rank, members))

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the manifest file; the figures of the base are top-level keys."""
        return {
            "format": FORMAT,
            "pluralign": self.pluralign,
            "settings": to_json(self.settings),
            "members": to_json(self.members),
            **(to_json(self.base) if self.base else {}),
            **({"serving": to_json(self.serving)} if self.serving else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Manifest":
        """Return the manifest that ``to_json`` wrote."""
        return cls(
            settings=dict(value["settings"]),
            members=tuple(from_json(TunedPolicy, member) for member in value["members"]),
            base=from_json(BaseRecord, value) if value["members"] else None,
            serving=from_json(Serving, value["serving"]) if value["members"] else None,
            pluralign=value["pluralign"],
        )

    def save(self, folder: Path) -> None:
        """Write the manifest file of a folder, in one atomic write."""
        with atomic_write(folder / MANIFEST_FILE) as partial:
            text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")


def load_manifest(folder: Path, settings: Settings) -> Manifest:
    """Return the manifest of a folder, or an empty one if the folder is new.

    Members whose adapter is missing are left out, so that they are tuned again.

    Raises:
        UsageError: the folder is a file.
        DataError: the folder holds other files, or policies that were tuned with other settings.
    """
    path = folder / MANIFEST_FILE
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder.")
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise DataError("the folder holds other files", file=str(folder), remedy="name a new folder")
        return Manifest(settings)
    manifest = read_manifest(folder)
    if changed := [name for name in settings if manifest.settings.get(name) != settings[name]]:
        hashes = {"ensemble": "another ensemble", "prompts": "other prompts"}
        known = ", ".join(hashes.get(name, f"{name} {manifest.settings.get(name)}") for name in changed)
        remedy = "name another folder, or use these settings to resume"
        raise DataError(f"its policies were tuned with {known}", file=str(folder), remedy=remedy)
    present = tuple(policy for policy in manifest.members if (folder / policy.path).is_dir())
    return replace(manifest, settings=settings, members=present)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        DataError: there is none, or ``tune`` did not write it.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        remedy = "name a folder that pluralign tune wrote"
        raise DataError(f"it has no {MANIFEST_FILE}", file=str(folder), remedy=remedy)
    try:
        return Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError):
        remedy = "name another folder"
        raise DataError("pluralign tune did not write this file", file=str(path), remedy=remedy) from None


def run_settings(
    ensemble: RewardEnsemble, prompts: Sequence[PromptLike], model: str, options: TuneOptions
) -> dict[str, Any]:
    """Return everything that the policies depend on: the model, hashes of ensemble and prompts, and the options."""
    settings = {"model": model, "ensemble": ensemble_hash(ensemble), "prompts": _prompts_hash(prompts)}
    settings |= to_json(options)
    del settings["micro_batch"]  # it changes the memory that is needed, not the method
    return settings


def ensemble_hash(ensemble: RewardEnsemble) -> str:
    """Return a hash of the ensemble's features, weights and members, which identifies it in a manifest."""
    digest = hashlib.sha256(json.dumps(ensemble.features.to_json(), sort_keys=True, default=str).encode())
    digest.update(ensemble.weights.tobytes())
    for name, array in sorted(ensemble.members.arrays().items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _prompts_hash(prompts: Sequence[PromptLike]) -> str:
    return hashlib.sha256("\0".join(sorted(Prompt(prompt).key for prompt in prompts)).encode()).hexdigest()[:16]


def served_name(model: str) -> str:
    """Return the name of the base on a server: a hub id, or the folder of a local model."""
    return str(reference_folder(model).resolve()) if model == "smollm2" or Path(model).exists() else model


def serving(base: str, lora_rank: int, members: Sequence[TunedPolicy]) -> Serving:
    """Return a vLLM command for the base and the adapters, and the weights to draw the adapters with.

    The weights are those of the ensemble, normalised over the tuned members; equal if all of them are 0.
    """
    total = sum(policy.weight for policy in members)
    command = [
        *("vllm", "serve", base, "--enable-lora", "--max-loras", str(len(members)), "--max-lora-rank"),
        str(next(allowed for allowed in VLLM_RANKS if allowed >= lora_rank)),
        *("--lora-modules", *(f"{policy.path}={policy.path}" for policy in members)),
    ]
    weights = {policy.path: policy.weight / total if total else 1 / len(members) for policy in members}
    return Serving(shlex.join(command), weights)
