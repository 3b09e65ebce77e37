"""``RewardEnsemble``: k reward models, their weights, and the two readings of their votes.

An ensemble is a value: fitting and pruning return new ones. Its files are in ``folder``, and how it is learned is in
``learning``.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from pluralign.core.arrays import FloatArray, Vectors
from pluralign.core.checkpoints import fingerprint
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.files import locked
from pluralign.core.hub import HUB_ID, hub_folder
from pluralign.core.json_values import from_json
from pluralign.core.late import late
from pluralign.core.types import Level, Progress
from pluralign.ensemble import folder as disk
from pluralign.ensemble.members import LinearMembers
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, NO_PROMPTS, FitRecord, PromptHashes
from pluralign.text.encoders import Encoder, TextFeatures, encode
from pluralign.text.finetuned import KIND, FinetunedFeatures
from pluralign.text.reference import log_ratio
from pluralign.theory import calibration
from pluralign.theory.posterior import ChoiceModel
from pluralign.votes.load import ItemsLike, VotesLike, as_items, pair_texts
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Item, Message, Prompt, PromptLike, text_key

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RewardFunc: TypeAlias = Callable[..., list[Any]]
"""Takes prompts and completions, returns one number each. ``list[float]`` is not a ``list[float | None]``, TRL's type.
"""
ARRAYS_FILE = "ensemble.safetensors"
AVERAGE = "soft_bt"
"""The baseline whose reward stands for a person who follows no member."""
VOICES = "voices"
"""The mixture of the test of voices, beside the baselines."""
TRAINING_PROMPTS = "training_prompts"
"""Name of the array with the hashes of the training prompts."""


@dataclass(frozen=True, eq=False)
class RewardEnsemble:
    """k reward models with weights. The weight of the members preferring a response predicts its share of votes."""

    members: LinearMembers
    weights: FloatArray
    """The paper's α, ``(k,)``: non-negative, with sum 1."""
    features: TextFeatures | FinetunedFeatures
    temperature: float = 1.0
    """β of the policy-level reading, fitted on validation prompts."""
    undecided: float = 0.0
    """u, the share of votes that no member explains. They are predicted to split evenly."""
    record: FitRecord = field(default_factory=FitRecord)
    """The record of the fit: method, options, versions, data, history and held-out figures."""
    baselines: Mapping[str, Mapping[str, npt.NDArray[Any]]] = field(default_factory=dict)
    """Arrays of the baselines fitted with it, by name. ``record`` has their formulas."""
    trained_on: PromptHashes = field(default_factory=lambda: NO_PROMPTS)
    """Sorted hashes of the training prompts."""
    choice_model: ChoiceModel = field(default_factory=ChoiceModel)
    """What the choices of a person say about the person; for steering and for the prediction of individuals."""

    @property
    def k(self) -> int:
        """Number of members."""
        return len(self.weights)

    def __repr__(self) -> str:
        weights = ", ".join(f"{weight:.2f}" for weight in self.weights)
        undecided = f", undecided {self.undecided:.2f}" if self.undecided else ""
        return f"RewardEnsemble({self.record.method} k={self.k}, weights {weights}{undecided})"

    def __str__(self) -> str:
        return self.record.insight.text() if self.record.insight else repr(self)

    def _repr_html_(self) -> str:
        return str(late("publishing.notebook", "ensemble_html")(self))

    def plot(self) -> "Figure":
        """Return a figure: held-out Brier score by number of members, beside the reliability curve. Needs matplotlib.

        Raises:
            MissingExtraError: matplotlib is not installed.
            UsageError: the ensemble has no held-out figures.
        """
        drawing: Figure = late("publishing.figures", "plot_ensemble", purpose="a figure")(self)
        return drawing

    def rewards(self, items: ItemsLike, progress: Progress | None = None) -> FloatArray:
        """Return the reward of each member for each text, ``(n_items, k)``.

        Args:
            items: (prompt, response) tuples, dicts or rows with ``prompt`` and ``response``, see ``as_items``.
            progress: called with the texts encoded and the total.
        """
        texts = as_items(items)
        return self.members.rewards(self.features(texts, progress)) if texts else np.empty((0, self.k))

    @property
    def average_theta(self) -> FloatArray | None:
        """The soft BT reward for everyone, ``(D,)``, on the inputs of the members. None if there is none."""
        theta, dimension = self.baselines.get(AVERAGE, {}).get("theta"), len(self.members.theta)
        if theta is None or theta.ndim != 1 or len(theta) > dimension:
            return None
        if len(theta) < dimension and not isinstance(self.features, TextFeatures):
            return None
        # Baselines beside a trained pooling use the frozen inputs, which come first.
        return np.pad(np.asarray(theta, np.float64), (0, dimension - len(theta)))

    def rewards_and_average(self, items: ItemsLike, progress: Progress | None = None) -> FloatArray:
        """Return ``rewards``, and the reward of ``average_theta`` as one more column if there is one."""
        texts = as_items(items)
        theta = self._theta_and_average
        return self._product(self.features(texts, progress), theta) if texts else np.empty((0, theta.shape[1]))

    @property
    def _theta_and_average(self) -> FloatArray:
        average = self.average_theta
        return self.members.theta if average is None else np.column_stack([self.members.theta, average])

    def _product(self, features: Vectors, theta: FloatArray) -> FloatArray:
        return np.asarray(self.members.inputs(features) @ theta, dtype=np.float64)

    def scorer(self, *, average: bool = False) -> Callable[[ItemsLike], FloatArray]:
        """Return a function like ``rewards`` for servers: models stay in memory, and vectors are not cached on disk.

        With ``average`` it is like ``rewards_and_average``.
        """
        own, surface = self.features, self.features.surface
        encoders: list[Encoder | None] = [own.load_checked()] if isinstance(own, TextFeatures) else [*own.parts()]
        theta = self._theta_and_average if average else self.members.theta

        def rewards(items: ItemsLike) -> FloatArray:
            texts = as_items(items)
            features = [encode(texts, encoder, surface=surface, cache=False) for encoder in encoders]
            return self._product(np.hstack(features), theta)

        return rewards

    def as_reward_func(self, member: int | None = None) -> RewardFunc:
        """Return one member as a reward function for TRL, as in ``GRPOTrainer(reward_funcs=…)``.

        The function takes ``prompts`` and ``completions``, texts or lists of messages, and returns one reward per
        completion. Models stay in memory, and each distinct text is encoded once per call.

        Args:
            member: number of the member. It is required: members have different scales, and each stands for one view.
        """
        last = self.k - 1
        if member is None:
            raise UsageError(
                f"as_reward_func needs one member, 0 to {last}: members have different scales, so their rewards cannot "
                "be averaged. Train one policy per member."
            )
        if isinstance(member, bool) or not isinstance(member, int) or not 0 <= member <= last:
            raise UsageError(f"member must be 0 to {last}, not {member!r}.")
        score = self.scorer()

        def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
            """Return the reward of each completion."""
            items = [trainer_item(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
            keys = [text_key(*item) for item in items]
            distinct = dict(zip(keys, items, strict=True))
            if not distinct:
                return []
            rewards = dict(zip(distinct, score(list(distinct.values()))[:, member].tolist(), strict=True))
            return [rewards[key] for key in keys]

        reward.__name__ = f"member_{member}"
        return reward

    def pair_rewards(self, pairs: VotesLike, progress: Progress | None = None) -> tuple[FloatArray, FloatArray]:
        """Return the rewards of both responses of each pair, each ``(n_pairs, k)``. Each text is encoded once.

        Args:
            pairs: a ``PreferenceSet``, a path, a pandas DataFrame, a ``datasets`` object or a list of dicts. Rows need
                the columns prompt, response_a and response_b, and no votes; each gives one pair.
            progress: called with the texts encoded and the total.
        """
        texts, a, b = pair_texts(pairs)
        rewards = self.rewards(texts, progress)
        return rewards[a], rewards[b]

    def votes(self, pairs: VotesLike) -> FloatArray:
        """Return the votes 1[reward_a > reward_b], ½ for a tie, ``(n_pairs, k)``. ``pairs`` as in ``pair_rewards``."""
        return calibration.votes_from_rewards(*self.pair_rewards(pairs))

    def prob_hat(self, pairs: VotesLike, level: Level = "vote") -> FloatArray:
        """Return the predicted share preferring response a, ``(n_pairs,)``. ``pairs`` as in ``pair_rewards``.

        ``vote``: p̂ = u/2 + (1 − u) Σ_j α_j 1[Δr_j > 0] (Definition 1, with an undecided share u). ``policy``: the
        same with σ(Δr_j / β) for the vote, the probability that a policy drawn from the mixture prefers a (App. A, with
        a reference that favours neither, also if it was trained with another one). Its limit for β → 0 is the
        vote level.
        """
        if level not in get_args(Level):
            raise UsageError(f"level cannot be {level!r}; {did_you_mean(str(level), get_args(Level))}.")
        reward_a, reward_b = self.pair_rewards(pairs)
        return self.readings(reward_a - reward_b)[level]

    def readings(self, difference: FloatArray, log_ratio: npt.ArrayLike = 0.0) -> dict[Level, FloatArray]:
        """Return both readings, as in ``prob_hat``, from reward differences ``(n_pairs, k)``.

        Policies add log π_ref(a)/π_ref(b) to each logit, ``(n_pairs,)``.
        """
        votes = calibration.votes_from_rewards(difference, np.zeros_like(difference))
        shares: dict[Level, FloatArray] = {
            "vote": calibration.ensemble_prob(votes, self.weights),
            "policy": calibration.policy_prob(difference, self.weights, self.temperature, log_ratio),
        }
        return {level: calibration.with_undecided(share, self.undecided) for level, share in shares.items()}

    @property
    def reference(self) -> str | None:
        """The reference policy that it was trained with (App. A): ``data`` or a causal model; None for none."""
        found = self.record.options.get("reference")
        return None if found is None else str(found)

    def log_ratio(self, preferences: PreferenceSet) -> FloatArray | float:
        """Return log π_ref(a)/π_ref(b) of each pair, ``(n_pairs,)``; 0 if it was trained without a reference policy.

        The votes need the columns of ``text.reference.with_log_probs``.
        """
        return 0.0 if self.reference is None else log_ratio(preferences)

    @property
    def level(self) -> Level:
        """The level it was fitted for."""
        return self.record.level

    def take(self, indices: Sequence[int], weights: npt.ArrayLike, undecided: float | None = None) -> "RewardEnsemble":
        """Return an ensemble of some of the members, with new weights and undecided share (default: unchanged).

        The mixture of the test of voices and the insight are about all members, so they are left out.
        """
        alpha, share = np.asarray(weights, dtype=np.float64), self.undecided if undecided is None else undecided
        baselines = {name: arrays for name, arrays in self.baselines.items() if name != VOICES}
        kept = replace(self, baselines=baselines, record=replace(self.record, insight=None))
        return replace(kept, members=self.members.take(indices), weights=alpha, undecided=share)

    def first(self, k: int) -> "RewardEnsemble":
        """Return a stagewise ensemble after its first k stages, with the weights and undecided share of that stage.

        A stage is missing if it gave weight to members that the ensemble no longer has.
        """
        stages = {stage.k: stage for stage in self.record.history if sum(stage.weights) > 1 - NEGLIGIBLE_WEIGHT}
        if self.record.method != "stagewise":
            raise UsageError("first(k) needs a stagewise ensemble; joint members are calibrated only together.")
        if k not in stages or not 1 <= k <= self.k:
            raise UsageError(f"k must be one of {', '.join(str(one) for one in stages if one <= self.k)}, not {k}.")
        return self.take(range(len(stages[k].weights)), stages[k].weights, stages[k].undecided)

    # --- on disk and on the hub -------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], *, revision: str | None = None, encoder: str | None = None
    ) -> "RewardEnsemble":
        """Load an ensemble from a folder, or from a repository of the Hugging Face hub.

        Args:
            name: a folder, or a repository OWNER/NAME.
            revision: branch, tag or commit of the repository.
            encoder: folder or hub id of the encoder, if it has moved since the fit. Another model is rejected.
        """
        ensemble = cls.load(ensemble_folder(name, revision))
        if encoder is None:
            return ensemble
        if not isinstance(ensemble.features, TextFeatures):
            raise UsageError("encoder is for ensembles on frozen features; this one is fine-tuned.")
        return replace(ensemble, features=replace(ensemble.features, encoder=encoder, hub_id="", revision=""))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the ensemble into a folder: another name of ``save``."""
        self.save(folder)

    def push_to_hub(self, name: str, *, private: bool = True, names: Sequence[str] | None = None) -> str:
        """Upload the ensemble with a model card to the Hugging Face hub, and return the URL.

        The upload holds the members, weights, figures and hashes of the training prompts. It holds no vote, no text of
        the data and no local path. An encoder that came from the hub is named by its id and revision; another one is
        uploaded too.

        Args:
            name: the repository, OWNER/NAME. It is created if it does not exist.
            private: whether a new repository is private.
            names: names of the members on the card.
        """
        return str(late("publishing.export", "push_ensemble")(self, name, private=private, names=names))

    @cached_property
    def identity(self) -> str:
        """Hash of all that its predictions depend on. Held-out rewards carry it."""
        arrays = {**self.members.arrays(), "theta": np.asarray(self.members.theta, dtype=np.float64)}
        parts = [np.asarray(self.weights, dtype=np.float64), float(self.temperature), float(self.undecided)]
        return fingerprint([arrays, *parts, self.features.identity])

    def save(self, folder: str | os.PathLike[str], files: Mapping[str, bytes] | None = None) -> None:
        """Write the ensemble into a folder, in place of an earlier one. Readers see the old ensemble or the new one.

        Args:
            folder: is created if it is missing. Files that are not of an ensemble stay.
            files: contents of other files that belong to it, by name, such as its held-out votes.
        """
        folder = Path(folder)
        arrays: dict[str, npt.NDArray[Any]] = {TRAINING_PROMPTS: self.trained_on}
        arrays |= {f"members/{name}": array for name, array in self.members.arrays().items()}
        for name, baseline in self.baselines.items():
            arrays |= {f"baselines/{name}/{part}": array for part, array in baseline.items()}
        if problem := self._problem():
            raise DataError(f"an ensemble cannot be saved: {problem}")
        data = safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})
        with locked(folder):
            try:
                before = disk.used_names(folder)
            except DataError:
                before = set()
            try:
                features = self.features.save(folder)
                description = {
                    "arrays": disk.write_file(folder, ARRAYS_FILE, data),
                    "files": {name: disk.write_file(folder, name, content) for name, content in (files or {}).items()},
                    "features": features.to_json(),
                    "weights": self.weights.tolist(),
                    "temperature": self.temperature,
                    "undecided": self.undecided,
                    "choice_model": asdict(self.choice_model),
                    "facts": self.record.to_json(),
                }
                disk.write_description(folder, description)
            finally:
                disk.remove_unused(folder, before)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "RewardEnsemble":
        """Read an ensemble. Raises DataError if a file is missing, was changed, or holds impossible values."""
        return disk.read_consistently(Path(folder), lambda description: cls._read(Path(folder), description))

    @classmethod
    def _read(cls, folder: Path, description: Mapping[str, Any]) -> "RewardEnsemble":
        data, path = disk.read_file(folder, description["arrays"]), folder / disk.ENSEMBLE_FILE
        file = folder / description["arrays"]["file"]
        with disk.readable(file):
            arrays = safetensors.numpy.load(data)
        baselines: dict[str, dict[str, npt.NDArray[Any]]] = {}
        for name, array in arrays.items():
            kind, _, rest = name.partition("/")
            if kind == "baselines":
                baseline, _, part = rest.partition("/")
                baselines.setdefault(baseline, {})[part] = array
        own = {name.removeprefix("members/"): array for name, array in arrays.items() if name.startswith("members/")}
        with disk.readable(file, "it does not hold members"):
            members, trained_on = LinearMembers.from_arrays(own), arrays[TRAINING_PROMPTS]
        described = description["features"]
        with disk.readable(path, "its description of the features cannot be read"):
            kind_of = FinetunedFeatures if described.get("kind") == KIND else TextFeatures
            features = kind_of.from_json(described, folder)
        with disk.readable(path, "its choice model cannot be read"):
            choice_model = from_json(ChoiceModel, description["choice_model"])
        weights, record = np.array(description["weights"], dtype=np.float64), read_record(folder, description)
        beta, undecided = float(description["temperature"]), float(description["undecided"])
        ensemble = cls(members, weights, features, beta, undecided, record, baselines, trained_on, choice_model)
        if problem := ensemble._problem():
            raise DataError(problem, file=str(file), remedy=disk.REMEDY)
        return ensemble

    def _problem(self) -> str | None:
        """Return what is wrong with the arrays, None if nothing is."""
        if problem := self.members.problem() or self.choice_model.problem():
            return problem
        if self.members.n_members != len(self.weights):
            return f"it has {self.members.n_members} members and {len(self.weights)} weights"
        if not all(np.isfinite(array).all() for parts in self.baselines.values() for array in parts.values()):
            return "arrays of baselines must be finite"
        if self.trained_on.ndim != 1 or self.trained_on.dtype != np.uint64:
            return f"{TRAINING_PROMPTS} must be a list of 64-bit hashes"
        return None


def ensemble_folder(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the folder of an ensemble: a local folder, or a repository of the hub, downloaded if it is missing."""
    if Path(name).is_dir():
        return Path(name)
    if not HUB_ID.fullmatch(str(name)):
        raise DataError("there is no such folder", file=str(name), remedy="check the path, or give a hub id OWNER/NAME")
    return hub_folder(str(name), "model", revision=revision, remedy="check the name and the network, or give a folder")


def read_record(folder: Path, description: Mapping[str, Any]) -> FitRecord:
    """Return the record of the fit in the JSON of an ensemble."""
    with disk.readable(folder / disk.ENSEMBLE_FILE, "its record of the fit cannot be read"):
        return FitRecord.from_json(description["facts"])


def as_ensemble(ensemble: RewardEnsemble | str | os.PathLike[str]) -> RewardEnsemble:
    """Return an ensemble, loaded if a folder is given. Raises UsageError for anything else."""
    if isinstance(ensemble, RewardEnsemble):
        return ensemble
    if isinstance(ensemble, str | os.PathLike):
        return RewardEnsemble.load(ensemble)
    raise UsageError(f"the first argument must be an ensemble or its folder, not a {type(ensemble).__name__}.")


# --- Prompts and completions of trainers such as TRL's ``GRPOTrainer``.


def trainer_item(prompt: Any, completion: Any) -> Item:
    """Return a prompt and its response from the columns of a trainer: texts, or lists of messages.

    A chat of one user message counts as a text. If a completion has several messages, the last one is the response.

    Example:
        >>> trainer_item([{"role": "user", "content": "Tea?"}], [{"role": "assistant", "content": "Yes."}])
        ('Tea?', 'Yes.')
    """
    turns = () if isinstance(prompt, str) else _turns(prompt, "a prompt")
    response = completion
    if not isinstance(completion, str):
        *between, last = _turns(completion, "a completion")
        turns, response = (*turns, *between), last.content
    asked: PromptLike = turns or prompt
    return (turns[0].content if Prompt(asked).is_one_question else asked), response


def _turns(messages: Any, name: str) -> tuple[Message, ...]:
    try:
        turns = tuple(Message(str(turn["role"]), _content(turn["content"])) for turn in messages)
    except (TypeError, KeyError):
        turns = ()
    if not turns:
        raise UsageError(f"{name} must be a text or a list of messages with role and text content, not {messages!r}.")
    return turns


def _content(content: Any) -> str:
    """Return the text of a message, whose content may be a list of text parts."""
    if content is None:  # of a message that only calls a tool
        return ""
    if isinstance(content, str):
        return content
    if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
        raise TypeError
    return "".join(str(part["text"]) for part in content)
