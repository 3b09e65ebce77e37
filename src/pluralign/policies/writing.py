"""Use tuned policies: read the manifest of ``tune``, check that it belongs to an ensemble, and sample from adapters.

In this process, the base model is loaded once. All adapters are attached to it and switched, so k policies need hardly
more memory than one. On a server that serves the adapters, such as vLLM with ``--lora-modules``, each adapter is a
model with the name in the manifest.

``load_policies`` returns one ``Sampler`` per member, for ``answering.own_answers``.
"""

import importlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from pluralign.answering.generate import Sampler
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.text import one_line
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.models.causal import LocalModel
from pluralign.models.completion import Completion
from pluralign.models.loading import quiet_transformers
from pluralign.models.options import RemoteOptions, SamplingOptions
from pluralign.models.remote import ServerModel
from pluralign.policies.manifest import MANIFEST_FILE, Manifest, ensemble_hash, read_manifest
from pluralign.votes.prompts import PromptLike


@dataclass(frozen=True)
class TunedPolicies:
    """The policies of a folder that ``tune`` wrote, ready to write."""

    samplers: Mapping[int, Sampler]
    """By member."""
    base: Sampler
    """The base model without an adapter: it writes candidates for members without a policy."""
    missing: tuple[int, ...]
    """Members with weight that have no policy."""

    def prepare(self) -> None:
        """Load the base and all adapters, or check that the server has them."""
        for sampler in self.samplers.values():
            sampler.prepare()


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
    tuned_at = float(manifest.settings["temperature"] or 1.0)
    samplers: dict[int, Sampler]
    if remote and remote.base_url:
        samplers = {policy.member: ServedPolicy(policy.path, remote, tuned_at, folder) for policy in manifest.members}
        base: Sampler = ServerModel(manifest.base.base, remote)
    else:
        paths = {policy.member: folder / policy.path for policy in manifest.members}
        paths = {member: path for member, path in paths.items() if path.is_dir()}
        adapters = Adapters(str(manifest.settings["model"]))
        samplers = {member: AdapterPolicy(adapters, path, tuned_at) for member, path in paths.items()}
        base = AdapterPolicy(adapters, None, tuned_at)
    if not samplers:
        raise DataError("its adapters are missing", file=str(folder), remedy="run pluralign tune again")
    with_weight = [j for j in range(ensemble.k) if ensemble.weights[j] > NEGLIGIBLE_WEIGHT]
    return TunedPolicies(samplers, base, tuple(j for j in with_weight if j not in samplers))


def _check_owner(folder: Path, manifest: Manifest, ensemble: RewardEnsemble) -> None:
    """Raise DataError if the manifest has no finished member, or if it belongs to another ensemble."""
    if not manifest.members:
        raise DataError("no policy is finished", file=str(folder), remedy="run pluralign tune again to resume")
    k = len(manifest.members[0].rewards)
    remedy = "name the folder that was tuned to this ensemble, or run pluralign tune again"
    if k != ensemble.k:
        problem = f"its policies were tuned to an ensemble of {k} members, but this one has {ensemble.k}"
        raise DataError(problem, file=str(folder), remedy=remedy)
    if manifest.settings.get("ensemble") != ensemble_hash(ensemble):
        raise DataError("its policies were tuned to another ensemble", file=str(folder), remedy=remedy)
    for policy in manifest.members:
        if not 0 <= policy.member < k or policy.path != Path(policy.path).name:
            problem = f"it names a member {policy.member} at {policy.path!r}, which tune does not write"
            raise DataError(problem, file=str(folder / MANIFEST_FILE), remedy="run pluralign tune again")


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
        try:
            with quiet_transformers():
                if self._adapted is None:
                    self._adapted = peft.PeftModel.from_pretrained(self.base.model, path, adapter_name=path.name)
                else:
                    self._adapted.load_adapter(path, adapter_name=path.name)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
            raise DataError(
                f"peft cannot load the adapter ({one_line(error)})", file=str(path), remedy="run pluralign tune again"
            ) from None
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
        self._loaded = self.adapters.load(self.path)

    def _both(self) -> tuple[Any, Any]:
        return self.adapters.load(self.path)

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
