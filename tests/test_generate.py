"""Candidates from a language model: where prompts come from, distinct responses, seeds, resuming, and failures."""

import importlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import WriteLines, json_lines, run, run_in_terminal, wide

from pluralign import DataError, PreferenceSet, SamplingOptions, UsageError, fit
from pluralign.answering import generate as generation
from pluralign.answering.generate import Failure, generate, load_prompts, prompt_seed
from pluralign.ensemble.held_out import held_out_files, score_held_out
from pluralign.experiments.rehearsal import write_tiny_model
from pluralign.text.causal import Completion
from pluralign.votes.candidates import load_candidates
from pluralign.votes.prompts import Message, PromptLike

WORDS = "tea rum water yes no never please thank you with milk and sugar ? . ,"
PROMPTS = ["tea ?", "rum ?", "water with milk ?"]
CHAT = (Message("user", "tea ?"), Message("assistant", "no ."), Message("user", "rum ?"))
SHORT: dict[str, Any] = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", [WORDS]))


class Script:
    """A sampler that returns fixed responses, and records its calls."""

    name = "script"
    prepared = False

    def __init__(self, *rounds: Sequence[str | Completion], refuse: str = "") -> None:
        self.rounds, self.refuse = rounds, refuse
        self.calls: list[tuple[PromptLike, int, int]] = []
        self.rounds_of: dict[PromptLike, int] = {}

    def prepare(self) -> None:
        self.prepared = True

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        assert self.prepared
        if prompt == self.refuse:
            raise DataError("this prompt is refused")
        self.calls.append((prompt, n, seed))
        call = self.rounds_of.setdefault(prompt, 0)
        self.rounds_of[prompt] += 1
        responses = self.rounds[min(call, len(self.rounds) - 1)][:n]
        return [Completion(text) if isinstance(text, str) else text for text in responses]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "c.jsonl"


# --- with a model -----------------------------------------------------------------------------------------------------


def test_every_prompt_gets_its_distinct_responses(model: str, out: Path) -> None:
    done = generate([*PROMPTS, CHAT], out, model, 5, **SHORT)
    found = load_candidates(out)
    assert [row.prompt for row in found] == [*PROMPTS, CHAT]
    assert [(len(row.responses), row.repeats) for row in found] == [(5, 0)] * 4
    assert (done.lines, done.responses, done.short, done.failed) == (4, 20, 0, [])
    assert {word for row in found for text in row.responses for word in text.split()} <= {*WORDS.split()}


def test_responses_depend_on_the_prompt_and_the_seed_alone(model: str, out: Path, tmp_path: Path) -> None:
    generate(PROMPTS, out, model, 4, **SHORT)
    generate([PROMPTS[2]], tmp_path / "one.jsonl", model, 4, **SHORT)
    generate([PROMPTS[2]], tmp_path / "seed.jsonl", model, 4, seed=1, **SHORT)
    assert json_lines(out)[2] == json_lines(tmp_path / "one.jsonl")[0]
    assert json_lines(out)[2]["responses"] != json_lines(tmp_path / "seed.jsonl")[0]["responses"]


def test_a_prompt_longer_than_the_context_fails_alone(model: str, out: Path) -> None:
    done = generate(["tea " * 600, "tea ?"], out, model, 2, **SHORT)
    (failure,) = done.failed
    assert failure.prompt == "tea " * 600
    assert "603 tokens and the response up to 6, but the model reads 512" in failure.error
    assert [row.prompt for row in load_candidates(out)] == ["tea ?"]


def test_if_the_chat_template_rejects_a_prompt_only_that_prompt_fails(model: str, tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    folder = tmp_path / "strict"
    transformers.AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    refusal = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    done = generate([CHAT, "tea ?"], tmp_path / "c.jsonl", str(folder), 2, **SHORT)
    assert "chat template rejects the prompt (one turn only)" in done.failed[0].error
    assert done.lines == 1


# --- distinct responses -----------------------------------------------------------------------------------------------


def test_repeats_and_empty_texts_are_counted_and_sampled_again(tmp_path: Path) -> None:
    sampler = Script(["yes", " yes ", "", "no"], ["no", "never"], ["rum"])
    done = generate(["tea ?"], tmp_path / "c.jsonl", sampler, 4)
    assert json_lines(tmp_path / "c.jsonl")[0]["responses"] == ["yes", "no", "never", "rum"]
    assert [n for _, n, _ in sampler.calls] == [4, 2, 1]
    assert len({seed for *_, seed in sampler.calls}) == 3
    assert (done.repeats, done.empty, done.short) == (2, 1, 0)


def test_a_model_that_repeats_itself_is_sampled_a_bounded_number_of_times(out: Path) -> None:
    sampler = Script(["yes"] * 3)
    done = generate(["tea ?"], out, sampler, 3)
    assert len(sampler.calls) == generation.ROUNDS
    assert (done.short, done.responses, done.repeats) == (1, 1, 2 + 2 * (generation.ROUNDS - 1))


def test_a_prompt_with_only_empty_responses_fails(out: Path) -> None:
    done = generate(["tea ?"], out, Script(["", " \n"]), 2)
    assert (done.lines, "wrote nothing" in done.failed[0].error) == (0, True)


def test_chats_texts_seeds_and_rounds_have_different_prompt_seeds() -> None:
    assert len({prompt_seed(p, s, a) for p in ("x", (Message("user", "x"),)) for s in (0, 1) for a in (0, 1)}) == 8


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_a_resumed_file_ends_with_the_same_bytes(model: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    generate(PROMPTS, whole, model, 3, **SHORT)
    full = whole.read_bytes()
    first = full.index(b"\n") + 1
    for cut in (1, first - 1, first, first + 10):
        broken.write_bytes(full[:cut])
        done = generate(PROMPTS, broken, model, 3, **SHORT)
        assert broken.read_bytes() == full
        assert (done.resumed, done.lines, done.responses) == (full[:cut].count(b"\n"), 3, 9)


def test_a_finished_file_does_not_load_the_model(tmp_path: Path) -> None:
    generate(PROMPTS, tmp_path / "c.jsonl", Script(["yes", "no"]), 2)
    again = Script()
    assert generate(PROMPTS, tmp_path / "c.jsonl", again, 2).resumed == 3
    assert not again.prepared


@pytest.mark.parametrize(
    ("changes", "was"), [({"n": 3}, "n 2"), ({"temperature": 2.0}, "temperature 1.2"), ({"seed": 4}, "seed 0")]
)
def test_a_file_with_other_settings_is_refused(out: Path, changes: dict[str, Any], was: str) -> None:
    generate(PROMPTS, out, Script(["yes", "no"]), 2)
    before = out.read_bytes()
    with pytest.raises(DataError, match=f"row 1: its candidates were sampled with {was}; name another file"):
        generate(PROMPTS, out, Script(["yes", "no"]), **({"n": 2} | changes))
    assert out.read_bytes() == before


def test_failed_prompts_are_listed_and_tried_again(out: Path) -> None:
    failed = Path(f"{out}.failed")
    done = generate(PROMPTS, out, Script(["yes"], refuse=PROMPTS[1]), 1)
    assert done.failed == [Failure("this prompt is refused.", prompt=PROMPTS[1])]
    assert json_lines(failed) == [{"error": "this prompt is refused.", "row": None, "prompt": PROMPTS[1]}]
    assert generate(PROMPTS, out, Script(["yes"]), 1).lines == 3
    assert not failed.exists()


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_are_read_from_prompts_candidates_and_votes(write_jsonl: WriteLines, tmp_path: Path) -> None:
    chat = wide(prompt=[turn._asdict() for turn in CHAT])
    records = [{"prompt": "tea ?"}, {"prompt": "rum ?", "responses": ["no"]}, chat, {"prompt": "tea ?"}]
    assert load_prompts(write_jsonl(records)) == (["tea ?", "rum ?", CHAT], [])
    (tmp_path / "p.csv").write_text("prompt,other\ntea ?,1\n")
    assert load_prompts(tmp_path / "p.csv") == (["tea ?"], [])
    row = {"conversation_id": "c1", "conversation_type": "values guided", "opening_prompt": "tea ?"}
    write_jsonl([row], "conversations.jsonl")
    assert load_prompts(f"prism:{tmp_path}") == (["tea ?"], [])
    assert len(load_prompts("demo:300")[0]) == 38


def test_an_ensembles_folder_gives_its_held_out_prompts(tmp_path: Path) -> None:
    votes = PreferenceSet.from_columns(["tea ?", "rum ?"], ["yes"] * 2, ["no"] * 2, [1, 3], [2, 1])
    ensemble = fit(votes, k=1, encoder="none", folder=tmp_path, keep_held_out=False)
    with pytest.raises(DataError, match="the ensemble has no held-out votes"):
        load_prompts(tmp_path)
    ensemble.save(tmp_path, held_out_files(ensemble, score_held_out(ensemble, votes)))
    assert load_prompts(tmp_path) == ([prompt for prompt in votes.prompts if prompt in votes.split()[1].prompts], [])


def test_rows_without_a_prompt_are_failures_and_the_others_are_read() -> None:
    text = b'{"prompt": "tea ?"}\n{"prompt": " "}\n{not json\n{"other": 1}\n{"prompt": "rum ?"}\n'
    prompts, failures = load_prompts(io.BytesIO(text))
    assert prompts == ["tea ?", "rum ?"]
    assert [failure.row for failure in failures] == [2, 3, 4]
    assert "row 2: the prompt is empty" in failures[0].error


def test_a_limit_draws_the_same_prompts_in_any_order() -> None:
    def drawn(prompts: list[str], **options: int) -> Any:
        text = "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts)
        return load_prompts(io.BytesIO(text.encode()), limit=7, **options)[0]

    many = [f"prompt {i} ?" for i in range(40)]
    first = drawn(many)
    assert len(first) == 7
    assert first == drawn(many[::-1])[::-1] == [prompt for prompt in many if prompt in first]
    assert drawn(many, seed=1) != first


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_candidates_and_lists_failures(model: str, write_jsonl: WriteLines, out: Path) -> None:
    path = write_jsonl([{"prompt": "tea ?"}, {"prompt": ""}, {"prompt": "rum ?"}], "p.jsonl")
    arguments: list[str | Path] = ["generate", path, "-o", out, "--model", model, "-n", "3", "--max-new-tokens", "5"]
    done = run(*arguments, "--json")
    assert done.returncode == 1, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["lines"], facts["responses"], len(facts["failed"])) == (2, 6, 1)
    assert [row.prompt for row in load_candidates(out)] == ["tea ?", "rum ?"]
    code, shown, bar = run_in_terminal(*arguments)
    assert (code, "Sampling from" in bar) == (1, True)
    for words in ("6 responses to 2 of 2 prompts", "2 prompts were finished by an earlier run", "the prompt is empty"):
        assert words in shown


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n": 0}, "n must be at least one response per prompt, not 0."),
        ({"temperature": 0}, "temperature must be above 0 and at most 10, not 0."),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5."),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0."),
        ({"limit": 0}, "the limit must be at least one prompt, not 0."),
        ({"output": "."}, ". is a folder; name the file to write, such as candidates.jsonl."),
    ],
)
def test_bad_settings_raise_a_usage_error_in_one_sentence(changes: Any, sentence: str, out: Path) -> None:
    given = {"prompts": PROMPTS, "output": out, "n": 2, "model": Script(["yes", "no"])}
    with pytest.raises(UsageError) as caught:
        generate(**given | changes)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: there is no such file; name a file with a column prompt"),
        ("-", "standard input: there are no prompts in it; write lines of"),
    ],
)
def test_missing_prompts_print_one_sentence(prompts: str, sentence: str, out: Path) -> None:
    done = run("generate", prompts, "-o", out)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pluralign: {sentence}"), done.stderr


def test_a_folder_without_a_language_model_fails_before_any_prompt(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="transformers cannot load it"):
        generate(["tea ?"], tmp_path / "c.jsonl", str(tmp_path), 2)
    assert not (tmp_path / "c.jsonl.failed").exists()


NOT_OURS = [b"my notes", b"my notes\n", b"[]", b'{"prompt": not JSON}\n', b"\x00\xff"]
NOT_OURS += [b'{"prompt": "tea ?"}', b'{"prompt": "tea ?", "responses": ["yes"]}']


@pytest.mark.parametrize("content", NOT_OURS)
@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.failed"])
def test_a_file_that_generate_did_not_write_is_left_alone(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"row 1: pluralign generate did not write this line; name another file"):
        generate(["tea ?"], tmp_path / "c.jsonl", Script(["yes", "no"]), 2)
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("torn", [b"", b"{", b'{"prompt": "te', b'{"prompt": "tea ?", "responses": ["yes"], "samp'])
def test_a_first_line_that_a_kill_tore_is_written_again(torn: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(torn)
    generate(["tea ?"], tmp_path / "c.jsonl", Script(["yes", "no"]), 2)
    assert json.loads((tmp_path / "c.jsonl").read_text())["responses"] == ["yes", "no"]
