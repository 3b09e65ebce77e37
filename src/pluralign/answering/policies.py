"""Use tuned policies: read the manifest of ``tune``, check that it belongs to an ensemble, and sample from adapters.

In this process, the base model is loaded once. All adapters are attached to it and switched, so k policies need hardly
more memory than one. On a server that serves the adapters, such as vLLM with ``--lora-modules``, each adapter is a
model with the name in the manifest.

``load_policies`` returns one ``Sampler`` per member, for an ``Answerer``.
"""

import hashlib
import importlib
import json
import os
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pluralign.answering.generate import Sampler
from pluralign.answering.options import TuneOptions
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import atomic_write, refuse_foreign
from pluralign.core.json_values import from_json, to_json
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import Settings
from pluralign.text.causal import Completion, LocalModel
from pluralign.text.loading import check_model, errors_of, model_folder, quiet_transformers
from pluralign.text.options import RemoteOptions, SamplingOptions
from pluralign.text.remote import ServerModel
from pluralign.votes.prompts import Prompt, PromptLike

# --- The manifest of a folder of policies: settings, figures and how to serve the adapters, as typed values.


MANIFEST_FILE = "manifest.json"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank (vllm/config/lora.py)."""


@dataclass(frozen=True)
class ExampleAnswer:
    """A held-out prompt with the first response of the base and of the policy, and their rewards."""

    prompt: Any
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

    name: str
    """Name of the base on a server: a hub id, or a local folder."""
    prompts: int
    """Number of training prompts."""
    held_out: int
    """Number of held-out prompts."""
    too_long: int
    """Number of prompts left out: together with a response they exceed the model's context."""
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
    """The state of a folder of policies: the contents of its manifest file."""

    settings: Settings
    """Everything that the policies depend on; see ``run_settings``."""
    members: list[TunedPolicy] = field(default_factory=list)
    """Finished members, in order."""
    base: BaseRecord | None = None
    serving: Serving | None = None
    pluralign: str = __version__

    @property
    def temperature(self) -> float:
        """The sampling temperature of the tuning; 0 if the settings have none that is possible."""
        value = self.settings.get("temperature")
        return float(value) if isinstance(value, int | float) and 0 < value <= 10 else 0.0

    def with_member(self, policy: TunedPolicy, lora_rank: int) -> "Manifest":
        """Return the manifest with one more finished member."""
        assert self.base is not None  # noqa: S101 - the base is sampled before any member is tuned
        members = sorted([*self.members, policy], key=lambda known: known.member)
        return replace(self, members=members, serving=serving(self.base.name, lora_rank, members))

    def save(self, folder: Path) -> None:
        """Write the manifest file of a folder, in one atomic write."""
        with atomic_write(folder / MANIFEST_FILE) as partial:
            text = json.dumps(to_json(self), indent=1, ensure_ascii=False, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")


def load_manifest(folder: Path, settings: Settings) -> Manifest:
    """Return the manifest of a folder, or an empty one if the folder is new.

    Members whose adapter is missing are left out, so that they are tuned again.

    Raises:
        UsageError: the folder is a file or holds other files.
        DataError: it holds policies that were tuned with other settings.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder.")
    if not (folder / MANIFEST_FILE).is_file():
        refuse_foreign(folder, MANIFEST_FILE)
        return Manifest(settings)
    manifest = read_manifest(folder)
    if changed := [name for name in settings if manifest.settings.get(name) != settings[name]]:
        hashes = {"ensemble": "another ensemble", "prompts": "other prompts"}
        known = ", ".join(hashes.get(name, f"{name} {manifest.settings.get(name)}") for name in changed)
        remedy = "name another folder, or use these settings to resume"
        raise DataError(f"its policies were tuned with {known}", file=str(folder), remedy=remedy)
    present = [policy for policy in manifest.members if (folder / policy.path).is_dir()]
    return replace(manifest, settings=settings, members=present)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        DataError: there is none, or ``tune`` did not write it.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise DataError(
            f"it has no {MANIFEST_FILE}", file=str(folder), remedy="name a folder that pluralign tune wrote"
        )
    try:
        manifest = from_json(Manifest, json.loads(path.read_text(encoding="utf-8")))
        if _is_of_tune(manifest):
            return manifest
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    raise DataError("pluralign tune did not write this file", file=str(path), remedy="name another folder")


def _is_of_tune(manifest: Manifest) -> bool:
    """Return whether the values of a manifest are ones that ``tune`` writes. Adapters are folders beside it."""
    is_settings = isinstance(manifest.settings.get("model"), str) and manifest.temperature > 0
    is_path = all(policy.path == adapter_name(policy.member) for policy in manifest.members)
    return is_settings and is_path and (manifest.base is not None or not manifest.members)


def adapter_name(member: int) -> str:
    """Return the name of a member's adapter, which is also the name of its folder."""
    return f"member-{member}"


def run_settings(
    ensemble: RewardEnsemble, prompts: Sequence[PromptLike], model: str, options: TuneOptions
) -> dict[str, Any]:
    """Return everything that the policies depend on: the model, hashes of ensemble and prompts, and the options."""
    keys = "\0".join(sorted(Prompt(prompt).key for prompt in prompts))
    hashes = {"ensemble": ensemble.identity, "prompts": hashlib.sha256(keys.encode()).hexdigest()[:16]}
    unimportant = ("micro_batch", "limit")  # memory, and the prompts, which have their hash
    own = {name: value for name, value in to_json(options).items() if name not in unimportant}
    return {"model": model, **hashes, **own}


def served_name(model: str) -> str:
    """Return the name of the base on a server: a hub id, or the folder of a local model."""
    return str(model_folder(model).resolve()) if model == "smollm2" or Path(model).exists() else model


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


@dataclass(frozen=True)
class TunedPolicies:
    """The policies of a folder that ``tune`` wrote, ready to write."""

    samplers: Mapping[int, Sampler]
    """By member."""
    base: Sampler
    """The base model without an adapter: it writes candidates for members without a policy."""


def load_policies(
    folder: str | os.PathLike[str], ensemble: RewardEnsemble, remote: RemoteOptions | None = None
) -> TunedPolicies:
    """Read the policies of an ensemble; models are loaded when they first write.

    Args:
        folder: the folder that ``tune`` wrote, or its manifest.
        ensemble: the one that the policies were tuned to.
        remote: with a base URL, the adapters are models of this server, by the names in the manifest.

    Raises:
        DataError: ``tune`` did not write the folder, no member is finished, or it belongs to another ensemble.
    """
    folder = Path(folder)
    folder = folder.parent if folder.name == MANIFEST_FILE else folder
    manifest = read_manifest(folder)
    _check_owner(folder, manifest, ensemble)
    assert manifest.base is not None  # noqa: S101 - there is a finished member
    tuned_at = manifest.temperature
    samplers: dict[int, Sampler]
    if remote and remote.base_url:
        samplers = {policy.member: ServedPolicy(policy.path, remote, tuned_at, folder) for policy in manifest.members}
        base: Sampler = ServerModel(manifest.base.name, remote)
    else:
        adapters = Adapters(str(manifest.settings["model"]))
        found = [(policy.member, path) for policy in manifest.members if (path := folder / policy.path).is_dir()]
        samplers = {member: AdapterPolicy(adapters, path, tuned_at) for member, path in found}
        base = AdapterPolicy(adapters, None, tuned_at)
    if not samplers:
        raise DataError("its adapters are missing", file=str(folder), remedy="run pluralign tune again")
    return TunedPolicies(samplers, base)


def _check_owner(folder: Path, manifest: Manifest, ensemble: RewardEnsemble) -> None:
    """Raise DataError if the manifest has no finished member, or if it belongs to another ensemble."""
    problem, remedy = "", "run pluralign tune again"
    if not manifest.members:
        problem = "no policy is finished"
    elif (k := len(manifest.members[0].rewards)) != ensemble.k:
        problem = f"its policies were tuned to an ensemble of {k} members, but this one has {ensemble.k}"
    elif manifest.settings.get("ensemble") != ensemble.identity:
        problem = "its policies were tuned to another ensemble"
        remedy = f"name the folder that was tuned to this ensemble, or {remedy}"
    elif not all(0 <= policy.member < ensemble.k for policy in manifest.members):
        problem = "it names members that the ensemble does not have"
    if problem:
        raise DataError(problem, file=str(folder / MANIFEST_FILE), remedy=remedy)


def with_tuned_temperature(options: SamplingOptions, tuned_at: float, *, small: bool) -> SamplingOptions:
    """Return the options with a policy's temperature: that of its tuning, or the lower default of small local models.

    Example:
        >>> with_tuned_temperature(SamplingOptions(), 1.0, small=False).temperature
        1.0
        >>> with_tuned_temperature(SamplingOptions(), 1.0, small=True).temperature
        0.7
    """
    filled = options.with_defaults(small=small)
    if options.temperature is not None or (small and filled.temperature is not None and filled.temperature < tuned_at):
        return filled
    return replace(filled, temperature=tuned_at, top_p=1.0 if options.top_p is None else options.top_p)


class Adapters:
    """A base model in this process, with the adapters that were used so far. One of them writes at a time."""

    def __init__(self, model: str) -> None:
        self.base = LocalModel(model)
        self._adapted: Any = None
        self._lock = threading.RLock()

    def load(self, path: Path | None) -> tuple[Any, Any]:
        """Return the model with this adapter attached, None for none, and the tokenizer.

        Raises:
            DataError: the adapter cannot be loaded, or belongs to another base.
        """
        with self._lock:
            if path is not None and (self._adapted is None or path.name not in self._adapted.peft_config):
                self._attach(path)
            return (self.base.model if self._adapted is None else self._adapted), self.base.tokenizer

    def _attach(self, path: Path) -> None:
        try:
            peft: Any = importlib.import_module("peft")
        except ImportError:
            raise MissingExtraError("peft", "finetune", "tuned policies") from None
        base = self.base.model
        check_model(path, adapter=True)
        with errors_of(path, "peft cannot load the adapter", "run pluralign tune again"), quiet_transformers():
            if self._adapted is None:
                self._adapted = peft.PeftModel.from_pretrained(base, path, adapter_name=path.name)
            else:
                self._adapted.load_adapter(path, adapter_name=path.name)
        self._adapted.eval()

    @contextmanager
    def using(self, path: Path | None) -> Iterator[None]:
        """Switch to an adapter, or to none, within the block. Other threads wait."""
        with self._lock:
            self.load(path)
            if self._adapted is None:
                yield
            elif path is None:
                with self._adapted.disable_adapter():
                    yield
            else:
                self._adapted.set_adapter(path.name)
                yield


class AdapterPolicy(LocalModel):
    """One member's policy in this process: the shared base with its adapter, or without one."""

    def __init__(self, adapters: Adapters, path: Path | None, tuned_at: float) -> None:
        super().__init__(adapters.base.name if path is None else f"{path.name} of {adapters.base.name}")
        self.adapters, self.path, self.tuned_at = adapters, path, tuned_at

    @cached_property
    def is_small(self) -> bool:
        """Whether the base is small."""
        return self.adapters.base.is_small

    def prepare(self) -> None:
        """Load the base, unless another policy did, and the adapter."""
        self.model, self.tokenizer = self.adapters.load(self.path)

    def with_defaults(self, options: SamplingOptions) -> SamplingOptions:
        """Return the options with a policy's temperature; the base has that of candidates."""
        if self.path is None:
            return super().with_defaults(options)
        small = options.temperature is None and self.is_small
        return with_tuned_temperature(options, self.tuned_at, small=small)

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        """Return n sampled responses of this member's policy."""
        with self.adapters.using(self.path):
            return super().sample(prompt, n, options, seed)


class ServedPolicy(ServerModel):
    """One member's policy on a server that serves its adapter as a model."""

    def __init__(self, model: str, options: RemoteOptions, tuned_at: float, folder: Path) -> None:
        super().__init__(model, options)
        self.tuned_at, self.folder = tuned_at, folder

    def prepare(self) -> None:
        """Reach the server. Raises UsageError if it does not answer, or lists models without this adapter."""
        known = self._models()
        if known and self.model not in known:
            raise UsageError(
                f"the server at {self.options.base_url} has no model {self.model!r}; serve the adapters with the "
                f"command in {self.folder / MANIFEST_FILE}."
            )

    def with_defaults(self, options: SamplingOptions) -> SamplingOptions:
        """Return the options with the temperature of the tuning, if none was given."""
        return with_tuned_temperature(options, self.tuned_at, small=False)
