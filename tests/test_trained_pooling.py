"""Attention pooling trained on the votes: used only if validation says so, saved, exported, and as in its formula."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from simulated import numeric_gradient
from tiny import camp_votes, ranked_camps, write_sentence_encoder

from pluralign import FitOptions, RewardEnsemble, UsageError, certify, evaluate, fit, load_preferences, load_rater_votes
from pluralign.ensemble.members import identity_map
from pluralign.learning import frozen as frozen_fit, trained_pooling, tuned as tuning, voices
from pluralign.learning.backbone.losses import JudgedLessons, MixtureLoss, PairLessons, RunningFigures
from pluralign.learning.backbone.recipe import MicroBatch, TextPairs, distinct_texts
from pluralign.learning.bradley_terry import damping_factor
from pluralign.learning.task import FitTask
from pluralign.learning.trained_pooling import ON_JUDGMENTS, ON_PAIRS, AttentionNetworks, Start, train_attention
from pluralign.learning.voices import FACTORS, RankedTexts, Voices
from pluralign.publishing.export import describe_reader, export
from pluralign.publishing.standalone import reward_model
from pluralign.text import bert
from pluralign.text.encoders import TextFeatures, load_encoder
from pluralign.text.pooling import ATTENTION_FILE, attention_pool, load_attention
from pluralign.text.states import TokenStates, read_token_states
from pluralign.text.surface import NAMES
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.judgments import Judgments
from pluralign.votes.preferences import PreferenceSet, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {"k": 2, "pooling": "attention", "surface": False, "layers": "2", "test_fraction": 0.2}


@pytest.fixture(scope="module", autouse=True)
def quick_training() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_pooling, "LEARNING_RATE", 1e-2)
        patch.setattr(trained_pooling, "ON_PAIRS", replace(ON_PAIRS, epochs=10, batch=32))
        patch.setattr(trained_pooling, "ON_JUDGMENTS", replace(ON_JUDGMENTS, networks=2))
        patch.setattr(voices, "STRENGTHS", (0.06, 0.01))
        patch.setattr(voices, "MANY_PROMPTS", 1)
        yield


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentence_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    return camp_votes(tmp_path_factory.mktemp("votes"), 400)


@pytest.fixture(scope="module")
def tuned(encoder: Path, votes: PreferenceSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit") / "tuned"
    fit(votes, folder=folder, encoder=str(encoder), **QUICK)
    return folder


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
def test_the_trained_pooling_learns_what_random_features_do_not_show(tuned: Path, votes: PreferenceSet) -> None:
    """Validation and test prompts agree that tuning helps; the ensemble reads texts with its own encoder."""
    ensemble = RewardEnsemble.load(tuned)
    record: Any = ensemble.record
    choice = record.encoders
    assert choice.used == "tuned"
    assert choice.validation_tuned < choice.validation_frozen
    assert choice.test_tuned < choice.test_frozen
    assert record.evaluation.test.brier_corrected == pytest.approx(choice.test_tuned)
    assert isinstance(ensemble.features, TextFeatures)
    assert Path(ensemble.features.encoder).parent == tuned
    assert np.isfinite(ensemble.rewards(texts_of(votes)[:4])).all()
    assert not list(tuned.glob("*unfinished*"))
    assert ensemble.record.insight is not None, "as after a fit on frozen features"


def test_texts_are_read_once_for_the_frozen_features_and_once_for_token_states(
    encoder: Path, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained features are those that the saved encoder gives."""
    read, encode = list[int](), ModelEncoder._encode

    def counted(self: ModelEncoder, model: Any, items: Any) -> Any:
        read.append(len(items))
        return encode(self, model, items)

    monkeypatch.setattr(ModelEncoder, "_encode", counted)
    monkeypatch.setattr(trained_pooling, "ON_PAIRS", replace(ON_PAIRS, epochs=1))
    monkeypatch.setenv("PLURALIGN_CACHE", str(tmp_path / "cache"))
    options = QUICK | {"surface": True, "compare_frozen": False}
    ensemble = fit(votes, folder=tmp_path / "fit", encoder=str(encoder), **options)
    assert sum(read) == len(texts_of(votes))
    texts = texts_of(votes)[:9]
    cached = ensemble.features(texts)
    monkeypatch.setenv("PLURALIGN_CACHE", str(tmp_path / "other"))
    np.testing.assert_allclose(ensemble.features(texts), cached, rtol=1e-4, atol=1e-4)
    assert sum(read) == len(texts_of(votes)) + 9


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
    """The first run breaks in the middle of the training, the second after it. The third one does not train again."""

    def breaks(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for target, name in ((PairLessons, "loss"), (tuning, "fit_members")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, breaks)
            with pytest.raises(KeyboardInterrupt):
                fit(votes, folder=tmp_path / "again", encoder=str(encoder), **QUICK)
    monkeypatch.setattr(trained_pooling, "train_attention", breaks)
    resumed = fit(votes, folder=tmp_path / "again", encoder=str(encoder), **QUICK)
    whole = RewardEnsemble.load(tuned)
    np.testing.assert_array_equal(resumed.weights, whole.weights)
    weights = [next(folder.glob(f"encoder-*/{ATTENTION_FILE}")) for folder in (tuned, tmp_path / "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_frozen_encoder_is_used_if_the_trained_features_are_worse(
    encoder: Path, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noise(states: Any, start: Any, *_: Any) -> Any:
        rng, heads = np.random.default_rng(0), (ON_PAIRS.networks, ON_PAIRS.heads)
        shapes = {"query": (*heads, 8), "bias": heads, "value": (*heads, 8, start.rewards.shape[1])}
        return {name: 5 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    monkeypatch.setattr(trained_pooling, "train_attention", noise)
    worse = fit(votes, folder=tmp_path / "worse", encoder=str(encoder), **QUICK)
    record: Any = worse.record
    assert record.encoders.used == "frozen"
    assert isinstance(worse.features, TextFeatures)
    assert Path(worse.features.encoder) == encoder
    assert not list((tmp_path / "worse").glob("encoder-*"))


def test_choices_on_trained_features_use_only_prompts_that_they_were_not_trained_on(
    encoder: Path, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen fit has folds of all training prompts. The trained fit has one fold: the validation prompts."""
    folds: list[list[set[int]]] = []
    trained: list[set[int]] = []
    start, train = frozen_fit.task_of, trained_pooling.train_attention

    def look_at_folds(*arguments: Any) -> FitTask:
        task = start(*arguments)
        folds.append([set(task.train.prompt[fold].tolist()) for fold in task.folds])
        return task

    def look_at_training(states: Any, start: Any, *arguments: Any, **rest: Any) -> Any:
        trained.append(set(start.lessons.prompt.tolist()))
        return train(states, start, *arguments, **rest)

    for module in (frozen_fit, tuning):
        monkeypatch.setattr(module, "task_of", look_at_folds)
    monkeypatch.setattr(trained_pooling, "train_attention", look_at_training)
    monkeypatch.setattr(trained_pooling, "ON_PAIRS", replace(ON_PAIRS, epochs=1))
    fit(votes, folder=tmp_path / "fit", encoder=str(encoder), **QUICK)
    _, _, tuned, frozen = folds  # the first two compare the features
    assert len(tuned) == 1
    assert not tuned[0] & trained[0]
    assert len(frozen) > 1
    assert frozen[0] & trained[0]


@pytest.mark.slow
def test_members_learn_from_the_mean_of_the_networks_on_top_of_the_frozen_mixture(
    encoder: Path, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher's share, recomputed from the frozen rewards and the outputs of each network."""
    seen: list[Any] = []
    build = trained_pooling._trained_inputs

    def look(task: Any, start: Any, vectors: Any, *rest: Any) -> Any:
        seen.append((start, vectors, build(task, start, vectors, *rest)))
        return seen[-1][2]

    monkeypatch.setattr(trained_pooling, "_trained_inputs", look)
    monkeypatch.setattr(trained_pooling, "ON_PAIRS", replace(ON_PAIRS, epochs=2))
    fit(votes, folder=tmp_path / "fit", encoder=str(encoder), **QUICK | {"surface": True})
    ((start, vectors, trained),) = seen
    items, frozen, teacher = votes.items(), start.rewards, trained.teacher
    corrections = vectors[:, 8 : -len(NAMES)].reshape(len(vectors), ON_PAIRS.networks, frozen.shape[1])
    rewards = frozen[:, None] + corrections
    mapped = start.inputs(np.delete(vectors, np.arange(8, vectors.shape[1] - len(NAMES)), axis=1))
    squares = start.teacher.squares(mapped[items.a] - mapped[items.b])
    damping = damping_factor(squares, teacher.damping, teacher.mean_square)
    difference = (rewards[items.a] - rewards[items.b]) * damping[:, None, None]
    shares = (1 / (1 + np.exp(-difference[:, :, :-1]))) @ start.teacher.voice_weights
    inputs = trained.inputs(vectors)
    damped = teacher.damp(inputs[items.a] - inputs[items.b])
    share = (1 / (1 + np.exp(-(damped @ teacher.voices)))) @ teacher.voice_weights
    np.testing.assert_allclose(share, shares.mean(axis=1), atol=2e-4)
    span = teacher.axes @ (teacher.axes.T @ teacher.voices)
    np.testing.assert_allclose(span, teacher.voices, atol=1e-3)


@pytest.mark.slow
def test_policy_level_members_learn_from_it_too(encoder: Path, votes: PreferenceSet, tmp_path: Path) -> None:
    ensemble = fit(votes, folder=tmp_path / "fit", encoder=str(encoder), **QUICK | {"level": "policy"})
    choice: Any = ensemble.record.encoders
    assert choice.validation_tuned < choice.validation_frozen
    assert choice.test_tuned < choice.test_frozen


@pytest.mark.slow
def test_baselines_use_the_frozen_features_only(tuned: Path, encoder: Path, votes: PreferenceSet) -> None:
    """They equal those of a fit on frozen features, so that a trained ensemble has no weaker rivals."""
    frozen = fit(votes, encoder=str(encoder), **QUICK | {"pooling": "mean"})
    own: Any = RewardEnsemble.load(tuned).record.evaluation
    other: Any = frozen.record.evaluation
    for name in ("soft_bt", "hard_bt"):
        assert own.baselines[name].brier == pytest.approx(other.baselines[name].brier, abs=1e-6)


@pytest.mark.slow
def test_a_saved_ensemble_has_the_figures_of_its_fit_and_everyones_reward(tuned: Path, votes: PreferenceSet) -> None:
    """Baselines have fewer inputs than members: they use the frozen ones, which come first."""
    ensemble = RewardEnsemble.load(tuned)
    fitted: Any = ensemble.record.evaluation
    again = evaluate(ensemble, votes)
    assert again.test.brier == pytest.approx(fitted.test.brier, abs=1e-9)
    for name, baseline in fitted.baselines.items():
        assert again.baselines[name].brier == pytest.approx(baseline.brier, abs=1e-6)
    average: Any = ensemble.average_theta
    n_trained = ON_PAIRS.networks * 9
    assert not average[-n_trained:].any()
    assert average[:-n_trained].any()
    assert np.abs(ensemble.members.theta[-n_trained:]).max() > 0
    theorem = certify(ensemble, votes).theorem_4
    assert "The features were trained on the same votes" in theorem.here


@pytest.mark.slow
def test_an_export_needs_no_pluralign(tuned: Path, votes: PreferenceSet, tmp_path: Path) -> None:
    """It computes the trained features too."""
    ensemble = RewardEnsemble.load(tuned)
    export(tuned, tmp_path / "exported")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'exported')!r}); sys.modules['pluralign'] = None; "
        f"import json; from reward_model import RewardModel; items = json.loads(sys.stdin.read()); "
        f"print(json.dumps(RewardModel.from_pretrained({str(tmp_path / 'exported')!r}).rewards(items).tolist()))"
    )
    items = [(str(prompt), response) for prompt, response in texts_of(votes)[:6]]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=json.dumps(items), capture_output=True, text=True, check=True)
    np.testing.assert_allclose(json.loads(done.stdout), ensemble.rewards(texts_of(votes)[:6]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", [{"architectures": ["LlamaForCausalLM"]}, {"is_encoder_decoder": True}, None])
def test_only_sentence_encoders_have_it(encoder: Path, tmp_path: Path, change: dict[str, Any] | None) -> None:
    other = shutil.copytree(encoder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **(change or {})}))
    name = str(other) if change else "hashing"
    with pytest.raises(UsageError, match="needs a sentence encoder such as minilm"):
        trained_pooling.frozen_encoder(FitOptions(encoder=name, pooling="attention"))


def test_a_folder_and_layers_are_needed(encoder: Path, votes: PreferenceSet) -> None:
    with pytest.raises(UsageError, match="need a folder for their models"):
        fit(votes, encoder=str(encoder), **QUICK)
    with pytest.raises(UsageError, match="name layers by number"):
        trained_pooling.frozen_encoder(FitOptions(encoder=str(encoder), layers="last"))


def test_an_automatic_precision_is_saved_as_chosen(
    encoder: Path, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained_pooling, "ON_PAIRS", replace(ON_PAIRS, epochs=0.2))
    ensemble = fit(votes, folder=tmp_path / "auto", encoder=str(encoder), **QUICK | {"precision": "auto"})
    assert isinstance(ensemble.features, TextFeatures)
    assert ensemble.features.precision in ("float32", "bfloat16")


# --- the pooling itself, against a slow reference ---------------------------------------------------------------------

MIDDLE_LAYER = 1
TEXTS = [("so ?", "tea and rum"), ("so ?", "tea"), ("so ?", "rum and rum and tea and milk"), ("why ?", "")]


def random_weights(width: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (2, 3, width), "bias": (2, 3), "value": (2, 3, width, 4)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def save_weights(folder: Path, seed: int = 0) -> None:
    saved = random_weights(8, seed) | {"layer": torch.tensor(MIDDLE_LAYER)}
    safetensors.torch.save_file(saved, folder / ATTENTION_FILE)


@pytest.fixture
def reader(tmp_path: Path) -> ModelEncoder:
    folder = write_sentence_encoder(tmp_path / "encoder")
    save_weights(folder)
    loaded = load_encoder(str(folder), layers="0,1,2")
    assert isinstance(loaded, ModelEncoder)
    return loaded


def reference(states: Any, weights: dict[str, Any]) -> Any:
    """The formula of the module, one text, network, head and output at a time. ``states`` is ``(n_tokens, d)``."""
    states, parts = np.asarray(states, float), {name: part.double().numpy() for name, part in weights.items()}
    states = (states - states.mean(1, keepdims=True)) / np.sqrt(states.var(1, keepdims=True) + 1e-5)
    result = []
    for network in range(parts["bias"].shape[0]):
        for output in range(parts["value"].shape[3]):
            total = 0.0
            for head in range(parts["bias"].shape[1]):
                query, bias = parts["query"][network, head], parts["bias"][network, head]
                scores = [np.exp(query @ state + bias) for state in states]
                pooled = sum(score * state for score, state in zip(scores, states, strict=True)) / sum(scores)
                total += float(parts["value"][network, head, :, output] @ pooled)
            result.append(total)
    return result


def test_pooling_equals_its_formula_and_ignores_padding() -> None:
    states, weights = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)), random_weights(8)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    pooled = attention_pool(states, mask, weights)
    assert pooled.shape == (3, 8)
    for row, length in enumerate((5, 2, 1)):
        np.testing.assert_allclose(pooled[row], reference(states[row, :length], weights), rtol=1e-4, atol=1e-5)
    states[1, 2:] = 100.0
    np.testing.assert_allclose(attention_pool(states, mask, weights), pooled, rtol=1e-5)


def test_all_readers_append_the_trained_features(reader: ModelEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in BERT, sentence-transformers, and exported scripts. The frozen features before them do not change."""
    own = reader.load_model()
    assert isinstance(own, bert.BertReader)
    vectors = own.read(own.tokens([f"{prompt}\n\n{response}" for prompt, response in TEXTS]))
    assert vectors.shape == (4, 3 * 8 + 2 * 4)
    for row, states in enumerate(reader.token_states(TEXTS, MIDDLE_LAYER)):
        np.testing.assert_allclose(vectors[row, 24:], reference(states, random_weights(8)), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(vectors[row, 8:16], states.mean(0), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(bert, "bert_reader", lambda *_, **__: None)
    other = reader.load_model()
    assert not isinstance(other, bert.BertReader)
    read = other.encode([f"{prompt}\n\n{response}" for prompt, response in TEXTS])
    np.testing.assert_allclose(read, vectors, rtol=1e-3, atol=1e-4)
    features = TextFeatures(str(reader.folder), layers="0,1,2")
    exported = reward_model._Encoder(reader.folder.parent, describe_reader(features, reader)).vectors(TEXTS)
    np.testing.assert_allclose(exported, vectors, rtol=1e-3, atol=1e-4)


def test_trained_features_are_part_of_the_identity_of_an_encoder(reader: ModelEncoder) -> None:
    """Else the vector cache would return features of another training."""
    save_weights(reader.folder, seed=1)
    other: Any = load_encoder(str(reader.folder), layers="0,1,2")
    assert other.identity != reader.identity
    assert load_attention(reader.folder.parent) is None


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", ["built-in", "sentence-transformers"])
def test_token_states_in_a_file_are_those_of_the_encoder(
    reader: ModelEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layer: int
) -> None:
    expected = reader.token_states(TEXTS, layer)
    if kind == "sentence-transformers":
        monkeypatch.setattr(ModelEncoder, "_model", property(_without_bert))
    calls: list[tuple[int, int]] = []
    stored = read_token_states(TEXTS, reader, layer, tmp_path / "states", lambda *done: calls.append(done))
    assert calls[-1] == (4, 4)
    states, mask = stored.padded(np.array([2, 0]))
    assert mask.sum(1).tolist() == [len(expected[2]), len(expected[0])]
    for row, text in enumerate((2, 0)):
        np.testing.assert_allclose(states[row][mask[row]].float(), expected[text].float(), rtol=1e-2, atol=1e-2)


def _without_bert(reader: ModelEncoder) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bert, "bert_reader", lambda *_, **__: None)
        return reader.load_model()


def test_saved_weights_give_the_outputs_of_the_trained_networks_up_to_a_constant() -> None:
    generator = torch.Generator().manual_seed(3)
    networks = AttentionNetworks(8, 3, replace(ON_JUDGMENTS, networks=2, dropout=0), generator)
    states, mask = torch.randn(40, 6, 8, generator=generator), torch.rand(40, 6, generator=generator) < 0.7
    mask[:, 0] = True
    networks(states, mask)  # updates the running mean and variance
    with torch.no_grad():
        outputs = networks.eval()(states, mask).flatten(1)
    weights = {name: torch.from_numpy(part) for name, part in networks.weights().items()}
    pooled = attention_pool(states, mask, weights)
    np.testing.assert_allclose(pooled - pooled[:1], outputs - outputs[:1], rtol=1e-3, atol=1e-4)


def marked_texts(rng: np.random.Generator, n: int) -> tuple[TokenStates, Any]:
    """Return texts of four tokens. Their value is that of the token that is marked in the last dimension."""
    states = rng.standard_normal((n, 4, 8)).astype(np.float32)
    marked = rng.integers(4, size=n)
    states[:, :, -1] = -2
    states[np.arange(n), marked, -1] = 2
    value = states[np.arange(n), marked, 0]
    flat = torch.from_numpy(states.reshape(-1, 8)).bfloat16()
    return TokenStates(flat, np.arange(n) * 4, np.full(n, 4)), value


def test_training_learns_which_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over tokens does not show the value of the marked one; attention finds it, also in new texts."""
    rng = np.random.default_rng(0)
    states, value = marked_texts(rng, 600)
    a, b = np.arange(0, 600, 2, dtype=np.int32), np.arange(1, 600, 2, dtype=np.int32)
    prob_a = 1 / (1 + np.exp(-4.0 * (value[a] - value[b])))
    pairs = TextPairs([], a, b, prob_a, np.arange(300, dtype=np.int32))
    lessons = PairLessons(pairs, MixtureLoss((0.5, 0.5)), {"prob_a": prob_a, "weight": np.ones(300)})
    nothing, quick = np.zeros((0, 3)), replace(ON_PAIRS, epochs=30, batch=50)
    start = Start(identity_map(0), nothing, np.zeros((600, 3)), lessons, quick)
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(trained_pooling, "LEARNING_RATE", 1e-2)
    weights = train_attention(states, start, 0, lambda *done: calls.append(done))
    assert calls[-1] == (180, 180)
    new, expected = marked_texts(rng, 200)
    parts = {name: torch.from_numpy(np.asarray(part)) for name, part in weights.items()}
    outputs = attention_pool(*new.padded(np.arange(200)), parts).view(200, -1, 3).mean(1)
    mean = new.states.view(200, 4, 8)[:, :, 0].float().mean(1)
    assert np.corrcoef(outputs[:, -1], expected)[0, 1] > 0.8
    assert np.corrcoef(mean, expected)[0, 1] < 0.6
    again = train_attention(states, start, 0)
    for name, part in weights.items():
        np.testing.assert_array_equal(part, again[name])


# --- whole judgments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linked", [False, True])
def test_the_steps_of_an_epoch_have_the_gradient_of_the_likelihood_of_all_judgments(linked: bool) -> None:
    """With ties and incomplete rankings. A step has one prompt; linked persons have judgments on several."""
    rng = np.random.default_rng(0)
    prompt, sizes = rng.integers(0, 3, 14), rng.integers(2, 6, 14)
    person = rng.integers(0, 6, 14) + (0 if linked else 6 * prompt)
    response = np.concatenate([rng.permutation(5)[:size] for size in sizes])
    judged = Judgments.from_scores(person, prompt, sizes, response, rng.integers(0, 4, sizes.sum()), linked=linked)
    items = (5 * np.repeat(judged.prompt, judged.sizes) + judged.response).astype(np.int32)
    mixture = Voices(np.eye(2), np.array([0.3, 0.7]), np.array([0.6, 0.4]), np.array(FACTORS))
    rewards, at = rng.standard_normal((16, 2)), np.unique(items)

    def log_likelihood(values: np.ndarray) -> float:
        moved = rewards.copy()
        moved[at] = values.reshape(-1, 2)
        return float(mixture.by_group(RankedTexts.of(judged, items, moved)).sum())

    expected = numeric_gradient(log_likelihood, rewards[at].ravel()).reshape(-1, 2)
    lessons = JudgedLessons(judged, items, mixture).given(rewards)
    found, total = np.zeros_like(rewards), 0.0
    for of_prompt in range(3):
        units = np.flatnonzero(lessons.prompt == of_prompt)
        texts, n = distinct_texts(lessons, units), len(units) * lessons.choices
        assert (texts // 5 == of_prompt).all()
        values = torch.from_numpy(rewards[texts]).requires_grad_()
        value = lessons.loss(values, MicroBatch(units, texts, 1.0), RunningFigures(), 0.0)
        value.backward()
        assert values.grad is not None
        found[texts] += -n * values.grad.numpy()
        total -= n * float(value.detach())
    assert lessons.choices == RankedTexts.of(judged, items, rewards).n_choices / judged.n
    np.testing.assert_allclose(found[at], expected, atol=1e-5)
    if not linked:
        assert total == pytest.approx(log_likelihood(rewards[at].ravel()))


@pytest.mark.slow
@pytest.mark.parametrize("raters", [False, True])
def test_rankings_train_the_pooling_and_the_members(encoder: Path, tmp_path: Path, raters: bool) -> None:
    rows = ranked_camps(300)
    votes: Any = load_rater_votes(rows, "person") if raters else load_preferences(rows)
    ensemble = fit(votes, folder=tmp_path / "fit", encoder=str(encoder), **QUICK)
    record: Any = ensemble.record
    choice = record.encoders
    assert record.target == ("raters" if raters else "judgments")
    assert (choice.used, choice.judgments) == ("tuned", True)
    assert choice.why == "better on 24 validation prompts"
    assert choice.validation_tuned < choice.validation_frozen - 0.1
    likes = ensemble.rewards([("so ?", "tea rum"), ("so ?", "never no")])
    assert (likes[0] > likes[1]).all()
    export(tmp_path / "fit", tmp_path / "out")
