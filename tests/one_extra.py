"""Runs what an installation with one extra must be able to do: ``python one_extra.py EXTRA``, in an empty folder.

``tests/test_extras.py`` starts it in a process that can import only the packages of that extra, and
``tests/real_extras.py`` in a real environment. It imports pluralign and ``tiny``. The first failure ends it.
"""

import contextlib
import io
import json
import os
import shlex
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NO_TONE = "note: member cards leave out the tone of responses"


def main() -> None:
    """Run the commands of the extra in ``sys.argv``; without one, those of the installation without extras."""
    extra = sys.argv[1]
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "tea ?"}))
    Path("candidates.jsonl").write_text(json.dumps({"prompt": "Tea?", "responses": ["Yes, please.", "No.", "Maybe."]}))
    EXTRAS[extra]()
    print(f"{extra}: complete")


def pluralign(command: str) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code and its output on stdout and stderr."""
    from pluralign.cli.main import main as run

    print(f"pluralign {command}", flush=True)
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = ["pluralign", *shlex.split(command)]
        try:
            run()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return code, out.getvalue(), err.getvalue()


def works(command: str, notes: str = "") -> str:
    """Run a command that must succeed, with this note on stderr, once; return its stdout."""
    code, out, err = pluralign(command)
    assert code == 0, f"exit code {code}: {err}"
    assert out.strip(), "no output"
    assert err.count(notes) == 1 or not notes, f"expected one note {notes!r}, got {err!r}"
    return out


def needs(command: str, extra: str, also: str = "") -> None:
    """Run a command that must fail with one sentence that has the ``pip install`` command of an extra."""
    code, _, err = pluralign(command)
    sentence = err.strip().splitlines()[-1]
    assert code == 2, f"exit code {code}: {err}"
    assert f"run  pip install 'pluralign[{extra}]'{also}." in sentence, sentence


def fit_town(notes: str = "") -> None:
    """Fit the ensemble that the other commands use, unless the folder has one. It needs no extra."""
    if not Path("town").exists():
        works("fit demo:300 -o town --encoder hashing:32 --k 2 --target mixture --test-fraction 0.4", notes)


# --- what each extra must do ------------------------------------------------------------------------------------------


def core() -> None:
    """Without extras: everything on hashed features; ``real_extras.py`` also runs the demo."""
    works("inspect demo:300")
    fit_town(NO_TONE)
    works("evaluate town demo:400")
    works("certify town")
    works("prune town -o pruned")
    works("diversity town")
    Path("texts.jsonl").write_text(json.dumps({"prompt": "Tea?", "response": "Yes."}))
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}))
    Path("shares.csv").write_text(",A,B,C\nA,,0.6,0.7\nB,0.4,,0.5\nC,0.3,0.5,\n")
    works("score town texts.jsonl")
    works("compare town pairs.jsonl")
    works("profile town")
    works("answer town Tea? --candidates candidates.jsonl")
    works("rankings shares.csv")
    works("encode demo:300 -o features --encoder hashing")
    works("reproduce multipref --dry-run")
    needs("fit demo:300 -o other", "encoders", ", or use --encoder hashing")
    needs("encode demo:300 -o other", "encoders", ", or use --encoder hashing")
    needs("fit demo:300 -o other --backbone my-org/my-model", "finetune")
    needs("evaluate my-org/my-model demo:300", "encoders")
    needs("generate town -o other.jsonl", "encoders")
    needs("answer town Tea? --model smollm2", "encoders")
    needs("answer town Tea? --model any --base-url http://127.0.0.1:9/v1", "server")
    needs("tune town town -o other", "finetune")
    needs("reproduce multipref --tiny -o rehearsal", "report")
    needs("report town -o report.html", "report")
    needs("serve town", "server")
    needs("inspect hf:someone/something", "hf")
    needs("inspect multipref", "hf")
    needs("score town texts.jsonl -o scored --engine ray", "ray")
    assert not Path("other").exists()


def server() -> None:
    """``server`` serves: the page, and an answer from held-out candidates."""
    fit_town()
    with served("town") as ask:
        assert "<html" in ask("/")
        assert json.loads(ask("/healthz")) == {"status": "ok"}
        assert "pluralign_requests_total" in ask("/metrics")
        prompt = held_out_prompt(Path("town"))
        answer = json.loads(ask("/v1/answer", {"prompt": prompt, "mode": "balanced"}))
        assert answer["answers"], answer
        chat = {"model": "town:consensus", "messages": [{"role": "user", "content": prompt}]}
        assert json.loads(ask("/v1/chat/completions", chat))["choices"][0]["message"]["content"]
    needs("serve town --model smollm2", "encoders")
    code, _, err = pluralign("answer town Tea? --model any --base-url http://127.0.0.1:9/v1")
    assert (code, "127.0.0.1:9" in err) == (2, True), err  # the client is there, the server is not


def encoders() -> None:
    """``encoders`` fits with MiniLM or any model, generates and answers."""
    from tiny import two_camps, write_backbone

    write_backbone(Path("model"))
    Path("votes.jsonl").write_text("\n".join(map(json.dumps, two_camps(40))))
    works("fit votes.jsonl -o town --k 2 --target mixture --test-fraction 0.5", NO_TONE)
    works("fit votes.jsonl -o other --k 2 --target mixture --encoder model")
    works("generate prompts.jsonl -o generated.jsonl --model model -n 2 --max-new-tokens 4")
    works("answer town Tea? --candidates candidates.jsonl")
    works("answer town 'tea ?' --model model -n 3 --max-new-tokens 4")
    needs("serve town", "server")
    needs("tune town votes.jsonl -o policies --model model", "finetune")


def finetune() -> None:
    """``finetune`` fine-tunes, exports with a model card, scores, and tunes policies."""
    from tiny import two_camps, write_backbone

    write_backbone(Path("model"))
    Path("votes.jsonl").write_text("\n".join(map(json.dumps, two_camps(40))))
    works("fit votes.jsonl -o ensemble --k 2 --backbone model --epochs 1 --test-fraction 0.3")  # with SOAP
    works("fit votes.jsonl -o lora --k 2 --backbone model --epochs 1 --lora --optimizer adamw")
    works("export ensemble -o exported")
    assert "# 2 reward models" in Path("exported/README.md").read_text()
    works("export lora -o member --member 0")
    works("evaluate member votes.jsonl")
    works("answer ensemble Tea? --candidates candidates.jsonl")
    works("tune ensemble votes.jsonl -o policies --model model --limit 4 --steps 1 --max-new-tokens 4 --member 0")
    needs("fit votes.jsonl -o other", "encoders", ", or use --encoder hashing")


def report() -> None:
    """``report`` writes the page with its figures, and measures the tone of responses."""
    fit_town()
    works("report town -o report.html")
    assert "<svg" in Path("report.html").read_text()
    code, _, err = pluralign("profile town")
    assert (code, err) == (0, "")


def hf() -> None:
    """``hf`` reads data sets."""
    row = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No.", "votes_a": 3, "votes_b": 2}
    Path("dataset").mkdir()
    Path("dataset/train.jsonl").write_text(json.dumps(row))
    works("inspect hf:dataset")


def ray() -> None:
    """``ray`` scores on a cluster."""
    fit_town()
    Path("texts.jsonl").write_text(json.dumps({"prompt": "Tea?", "response": "Yes."}))
    works("score town texts.jsonl -o scored --engine ray --workers 1")


EXTRAS: dict[str, Callable[[], None]] = {
    "core": core, "server": server, "encoders": encoders, "finetune": finetune, "report": report, "hf": hf, "ray": ray,
}  # fmt: skip


# --- a server in this process -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(folder: str) -> Iterator[Callable[..., str]]:
    """Yield a function that sends requests to ``pluralign serve``, which runs in a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:  # the import limits of this process hold there too
        os.dup2(write, 1)
        os.close(read)
        from pluralign.cli.main import main as run

        sys.stdout = os.fdopen(1, "w")
        sys.argv = ["pluralign", "serve", folder, "--port", "0", "--json"]
        try:
            run()
        finally:
            os._exit(0)
    os.close(write)
    print(f"pluralign serve {folder}", flush=True)
    with os.fdopen(read) as stream:
        line = stream.readline()
        assert line, "the server did not start"
        address = json.loads(line)["address"]

        def ask(path: str, body: Any = None) -> str:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())

        try:
            yield ask
        finally:
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)


def held_out_prompt(folder: Path) -> str:
    """Return a prompt that the ensemble's folder keeps with its responses."""
    from pluralign.ensemble.held_out import load_held_out

    return str(load_held_out(folder).preferences.prompts[0])


if __name__ == "__main__":
    main()
