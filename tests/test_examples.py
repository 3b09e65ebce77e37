"""The examples run: offline, with tiny models, as a user would start them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_classifier import write_llama
from tiny import WORDS, two_camps, write_backbone

EXAMPLES = Path(__file__).parents[1] / "examples"
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_command(*arguments: object, cwd: Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=OFFLINE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(script: str, *arguments: object, cwd: Path) -> str:
    return run_command(EXAMPLES / script, *arguments, cwd=cwd)


def test_every_example_is_listed_and_run_here() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}}
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == files
    assert all(file in Path(__file__).read_text() for file in files)


@pytest.mark.slow
def test_a_reward_model_is_audited(tmp_path: Path) -> None:
    (tmp_path / "votes.jsonl").write_text("\n".join(map(json.dumps, two_camps(40))))
    model = write_llama(tmp_path / "model")
    output = run_script("audit_reward_model.py", model, "votes.jsonl", cwd=tmp_path)
    assert "on 40 pairs from 40 prompts" in output
    for reading in ("votes 1[Δr > 0]", "σ(Δr)", "σ(Δr/T)", "floor", "constant ½", "noise"):
        assert reading in output


@pytest.mark.slow
def test_a_policy_is_trained_with_a_member_as_reward(town_folder: Path, tmp_path: Path) -> None:
    policy = write_backbone(tmp_path / "base", pad=True)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{word} ?"}) for word in WORDS[:4]))
    options = ("--member", 1, "--policy", policy, "--steps", 1, "--generations", 2, "--max-completion-length", 4)
    output = run_script("grpo_with_a_member.py", town_folder, "prompts.jsonl", *options, cwd=tmp_path)
    assert re.search(r"step 1: mean reward -?\d+\.\d+", output)
    assert (tmp_path / "policy" / "model.safetensors").is_file()


def test_a_served_ensemble_answers_the_openai_client(town_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pluralign", "serve", str(town_folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            printed = (re.search(r"http://127\.0\.0\.1:\d+", row) for row in server.stdout)
            address = next(match[0] for match in printed if match)
            candidates = [part for text in ("Yes, many.", "No.") for part in ("--candidate", text)]
            script, question = "ask_with_openai_client.py", "Plant more trees?"
            output = run_script(script, question, "--base-url", f"{address}/v1", *candidates, cwd=tmp_path)
        finally:
            server.terminate()
    consensus, slate, random = re.split(r"Slate:|Three random members:", output)
    assert re.search(r"Consensus: (Yes, many\.|No\.)", consensus)
    assert "%" in slate
    assert len(random.split("\n  ")) == 4


RUN_NOTEBOOK = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.mark.slow
def test_the_notebook_runs_and_has_its_outputs(tmp_path: Path) -> None:
    path = EXAMPLES / "walkthrough.ipynb"
    run_command("-c", RUN_NOTEBOOK, path, cwd=tmp_path)
    committed, executed = (json.loads(file.read_text())["cells"] for file in (path, tmp_path / "executed.ipynb"))
    for old, new in zip(committed, executed, strict=True):
        if new["cell_type"] == "code":
            kinds = {output["output_type"] for output in old["outputs"]}
            assert kinds == {output["output_type"] for output in new["outputs"]}, "".join(old["source"])
            assert "error" not in kinds
