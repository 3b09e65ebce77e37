"""Fine-tuned sentence encoders: they start from the frozen ensemble, and are used only if validation says so."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import two_camps, write_sentence_encoder

from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.features.frozen import TextFeatures
from pluralign.fitting import tuned_encoder
from pluralign.fitting.fit import fit
from pluralign.fitting.task import FitTask
from pluralign.training.finetune import train_model
from pluralign.training.finetune.losses import MixtureLoss, RunningFigures
from pluralign.training.finetune.sentence import layer_stack, load_sentence_base
from pluralign.training.finetune.train_model import FinetuneRun
from pluralign.training.finetune.trainer import PairTrainer
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.votes.load import load_preferences
from pluralign.votes.preferences import PreferenceSet, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {
    "k": 2, "epochs": 6, "learning_rate": 3e-2, "batch_size": 32, "surface": False, "layers": "2",
}  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentence_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    path = tmp_path_factory.mktemp("votes") / "camps.jsonl"
    path.write_text("\n".join(map(json.dumps, two_camps(400))))
    return load_preferences(str(path))


@pytest.fixture(scope="module")
def tuned(encoder: Path, votes: PreferenceSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit") / "tuned"
    fit(votes, folder=folder, backbone=str(encoder), **QUICK)
    return folder


def test_untrained_model_reads_texts_like_the_frozen_encoder(encoder: Path, votes: PreferenceSet) -> None:
    """Identity rewards return the pooled states, which must be the features."""
    texts = texts_of(votes)[:20]
    frozen = TextFeatures(str(encoder), surface=False)(texts)
    base = load_sentence_base("x", encoder, (0, 1, 2), 64, np.ones(frozen.shape[1]), np.eye(frozen.shape[1]))
    model = base.reward_model().eval()
    tokens, note = base.tokens(texts)
    assert note is None
    for item, vector in zip(tokens, frozen, strict=True):
        with torch.no_grad():
            read = model(**{name: torch.tensor([ids]) for name, ids in item.items()}).logits[0]
        np.testing.assert_allclose(read, vector, atol=1e-5)


def test_only_the_upper_half_of_the_layers_and_the_rewards_are_trained(encoder: Path) -> None:
    model = load_sentence_base("x", encoder, (0, 1, 2), 64, np.ones(24), np.ones((24, 2))).reward_model()
    trained = {name for name, weights in model.named_parameters() if weights.requires_grad}
    assert trained
    assert all(name.startswith(("body.encoder.layer.1.", "score.")) for name in trained)


def test_mixture_loss_is_the_cross_entropy_of_the_mixture_and_half_that_of_the_last_reward() -> None:
    difference, prob_a = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]]), torch.tensor([0.25, 0.9])
    labels = {"prob_a": prob_a, "weight": torch.tensor([1.0, 0.5])}
    loss = MixtureLoss((0.3, 0.7))(difference, labels, RunningFigures(), 0.0)

    def entropy(share: Any, prob: float) -> float:
        return float(-prob * np.log(share) - (1 - prob) * np.log(1 - share))

    def sigmoid(x: float) -> float:
        return float(1 / (1 + np.exp(-x)))

    mixture = [0.3 * sigmoid(1) + 0.7 * sigmoid(-2), 0.3 * sigmoid(0) + 0.7 * sigmoid(1.5)]
    expected = np.mean([
        entropy(share, prob) + 0.5 * entropy(sigmoid(last), prob)
        for share, last, prob in zip(mixture, (0.5, -0.5), (0.25, 0.9), strict=True)
    ])  # fmt: skip
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_tuned_encoder_learns_what_random_features_do_not_show(tuned: Path, votes: PreferenceSet) -> None:
    """Validation and test prompts agree that tuning helps; the ensemble reads texts with its own encoder."""
    ensemble = RewardEnsemble.load(tuned)
    choice = ensemble.record.encoders
    assert choice is not None
    assert choice.used == "tuned"
    assert choice.validation_frozen is not None
    assert choice.test_frozen is not None
    assert choice.validation_tuned < choice.validation_frozen
    assert choice.test_tuned < choice.test_frozen
    assert ensemble.record.evaluation is not None
    assert ensemble.record.evaluation.test.brier_corrected == pytest.approx(choice.test_tuned)
    assert isinstance(ensemble.features, TextFeatures)
    assert Path(ensemble.features.encoder).parent == tuned
    assert np.isfinite(ensemble.rewards(texts_of(votes)[:4])).all()
    assert not list(tuned.glob("*unfinished*"))


@pytest.mark.slow
def test_a_copied_or_saved_ensemble_takes_its_encoder_along(tuned: Path, votes: PreferenceSet, tmp_path: Path) -> None:
    ensemble, texts = RewardEnsemble.load(tuned), texts_of(votes)[:5]
    ensemble.save(tmp_path / "saved")
    tuned.rename(tmp_path / "moved")
    try:
        for place in ("saved", "moved"):
            loaded = RewardEnsemble.load(tmp_path / place)
            np.testing.assert_allclose(loaded.rewards(texts), ensemble.members.rewards(loaded.features(texts)))
    finally:
        (tmp_path / "moved").rename(tuned)


@pytest.mark.slow
def test_an_interrupted_fit_resumes_with_the_same_encoder(
    tuned: Path, encoder: Path, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run breaks in the middle of the training, the second after it."""
    monkeypatch.setenv("PLURALIGN_CHECKPOINT_SECONDS", "0")
    loss, calls = PairTrainer.compute_loss, []

    def breaks(self: Any, *given: Any, **rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return loss(self, *given, **rest)

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for target, name, replacement in ((PairTrainer, "compute_loss", breaks), (tuned_encoder, "learn", broken)):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, replacement)
            with pytest.raises(KeyboardInterrupt):
                fit(votes, folder=tmp_path / "again", backbone=str(encoder), **QUICK)
    resumed = fit(votes, folder=tmp_path / "again", backbone=str(encoder), **QUICK)
    whole = RewardEnsemble.load(tuned)
    np.testing.assert_array_equal(resumed.weights, whole.weights)
    weights = [next(folder.glob("encoder-*/model.safetensors")) for folder in (tuned, tmp_path / "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_frozen_encoder_is_used_if_tuning_makes_it_worse(encoder: Path, votes: PreferenceSet, tmp_path: Path) -> None:
    worse = fit(votes, folder=tmp_path / "worse", backbone=str(encoder), **QUICK | {"learning_rate": 10.0, "epochs": 1})
    assert worse.record.encoders is not None
    assert worse.record.encoders.used == "frozen"
    assert isinstance(worse.features, TextFeatures)
    assert Path(worse.features.encoder) == encoder
    assert not list((tmp_path / "worse").glob("encoder-*"))


def test_choices_on_tuned_features_use_only_prompts_that_the_encoder_was_not_tuned_on(
    encoder: Path, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen fit has folds of all training prompts. The tuned fit has one fold: the validation prompts."""
    folds: list[list[set[int]]] = []
    trained: list[set[int]] = []
    start, train = FitTask.start, FinetuneRun.train

    def look_at_folds(*arguments: Any) -> FitTask:
        task = start(*arguments)
        folds.append([set(task.train.prompt[fold].tolist()) for fold in task.folds])
        return task

    def look_at_training(self: FinetuneRun, *arguments: Any) -> float:
        trained.append(set(self.pairs.prompt.tolist()))
        return train(self, *arguments)

    monkeypatch.setattr(FitTask, "start", look_at_folds)
    monkeypatch.setattr(FinetuneRun, "train", look_at_training)
    fit(votes, folder=tmp_path / "fit", backbone=str(encoder), **QUICK | {"epochs": 1})
    _, _, tuned, frozen = folds  # the first two compare the encoders
    assert len(tuned) == 1
    assert not tuned[0] & trained[0]
    assert len(frozen) > 1
    assert frozen[0] & trained[0]


def test_bfloat16_trains_float32_weights_with_bfloat16_products(
    encoder: Path, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--precision`` of an encoder is that of its products, in training as in encoding."""
    made: list[tuple[bool, set[str]]] = []
    trainer = FinetuneRun.trainer

    class Made(Exception):
        """Ends the fit before it trains."""

    def look(self: FinetuneRun, *arguments: Any, **options: Any) -> Any:
        built = trainer(self, *arguments, **options)
        assert built.model is not None
        made.append((built.args.bf16, {str(weights.dtype) for weights in built.model.parameters()}))
        raise Made

    monkeypatch.setattr(FinetuneRun, "trainer", look)
    monkeypatch.setattr(train_model, "check_cpu_bfloat16", lambda _: None)
    for precision in ("float32", "bfloat16"):
        with pytest.raises(Made):
            fit(votes, folder=tmp_path / precision, backbone=str(encoder), **QUICK | {"precision": precision})
    assert made == [(False, {"torch.float32"}), (True, {"torch.float32"})]


def test_sentence_encoders_have_their_own_defaults_unless_options_are_named(encoder: Path) -> None:
    tuning = FinetuneOptions(backbone=str(encoder))
    changed = tuned_encoder.encoder_defaults(tuning, ())
    assert (changed.optimizer, changed.epochs, changed.learning_rate) == ("adamw", 3.0, 3e-4)
    assert tuned_encoder.encoder_defaults(tuning, ("optimizer", "epochs")).optimizer == "soap"
    assert tuned_encoder.encoder_defaults(replace(tuning, epochs=2.0), ()).epochs == 2.0


@pytest.mark.parametrize(
    ("options", "tuning"), [({"method": "stagewise"}, {}), ({}, {"lora": True}), ({}, {"fresh_head": True})]
)
def test_other_methods_do_not_tune_an_encoder(encoder: Path, options: dict[str, Any], tuning: dict[str, Any]) -> None:
    assert tuned_encoder.tunes_encoder(FitOptions(), FinetuneOptions(backbone=str(encoder)))
    assert not tuned_encoder.tunes_encoder(FitOptions(**options), FinetuneOptions(backbone=str(encoder), **tuning))


def test_a_folder_is_needed_and_other_features_are_refused(encoder: Path, votes: PreferenceSet, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a folder for its models"):
        fit(votes, backbone=str(encoder))
    with pytest.raises(UsageError, match="--folds cannot be used with --backbone"):
        fit(votes, folder=tmp_path, backbone=str(encoder), folds=3)
    others: list[dict[str, Any]] = [{"layers": "last"}, {"pooling": "last"}]
    for other in others:
        with pytest.raises(UsageError, match="reads the mean over tokens of named layers"):
            fit(votes, folder=tmp_path, backbone=str(encoder), **other)


@pytest.mark.parametrize("change", [{"architectures": ["LlamaForCausalLM"]}, {"is_encoder_decoder": True}])
def test_a_decoder_is_not_tuned_as_a_sentence_encoder(encoder: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    other = tmp_path / "other"
    shutil.copytree(encoder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **change}))
    assert not tuned_encoder.tunes_encoder(FitOptions(), FinetuneOptions(backbone=str(other)))


def test_an_encoder_without_safetensors_or_with_one_repeated_layer_is_one_sentence(
    encoder: Path, votes: PreferenceSet, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(encoder, other)
    fit(votes, folder=tmp_path / "frozen", encoder=str(other), k=1, layers="2")  # its vectors are in the cache now
    (other / "model.safetensors").rename(other / "weights.safetensors")
    with pytest.raises(DataError):
        fit(votes, folder=tmp_path / "none", backbone=str(other), **QUICK)
    albert = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2), modules=list, name_or_path="albert")
    with pytest.raises(DataError, match="albert: its upper layers cannot be trained alone; use --lora"):
        layer_stack(albert)


def test_an_automatic_precision_is_saved_as_chosen(encoder: Path, votes: PreferenceSet, tmp_path: Path) -> None:
    quick = QUICK | {"epochs": 0.2, "precision": "auto"}
    ensemble = fit(votes, folder=tmp_path / "auto", backbone=str(encoder), **quick)
    assert isinstance(ensemble.features, TextFeatures)
    assert ensemble.features.precision in ("float32", "bfloat16")
