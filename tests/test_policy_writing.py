"""Tuned policies that write answers: adapters in this process, adapters on a server, and manifests that do not fit."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import run
from test_remote import Reply, Request, Serve, fails, says, serve  # noqa: F401 - a fixture
from test_tune import TOWN, ensemble_of
from tiny import write_backbone

from pluralign import answer
from pluralign.answering.adapters import save_adapter
from pluralign.answering.generate import sample_distinct
from pluralign.answering.options import TuneOptions
from pluralign.answering.policies import AdapterPolicy, BaseRecord, Manifest, TunedPolicy, load_policies, run_settings
from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.text.causal import LocalModel
from pluralign.text.options import RemoteOptions, SamplingOptions

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SHORT = SamplingOptions(max_new_tokens=8, temperature=1.0)


def write_policies(folder: Path, model: Path, ensemble: RewardEnsemble) -> Path:
    """Write the folder of ``tune`` with random adapters; test_tune checks that those of ``tune`` can write too."""
    torch, peft = importlib.import_module("torch"), importlib.import_module("peft")
    record = BaseRecord(str(model), 4, 2, 0, {"mean": [0.0] * ensemble.k, "spread": [1.0] * ensemble.k}, [0.0], 4.0)
    manifest = Manifest(run_settings(ensemble, ["tea ?"], str(model), TuneOptions()), base=record)
    for j in range(ensemble.k):
        path = f"member-{j}"
        with torch.random.fork_rng():
            torch.manual_seed(j)
            config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            adapted = peft.get_peft_model(LocalModel(str(model)).model, config)
        save_adapter(adapted, str(model), folder / path)
        tuned = TunedPolicy(
            j,
            path,
            float(ensemble.weights[j]),
            path,
            0.0,
            1.0,
            (0.5, 1.5),
            True,
            1.0,
            0.1,
            [0.0] * ensemble.k,
            4.0,
            1.0,
            [],
        )
        manifest = manifest.with_member(tuned, 8)
    manifest.save(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("llama"), eos_token_id=2, initializer_range=0.2)


@pytest.fixture(scope="module")
def policies(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policies(tmp_path_factory.mktemp("tuned") / "policies", llama, TOWN)


@pytest.fixture(scope="module")
def ensemble_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("town")
    TOWN.save(folder)
    return folder


# --- in this process --------------------------------------------------------------------------------------------------


def test_each_policy_writes_what_its_adapter_alone_would_write(policies: Path, llama: Path) -> None:
    peft = importlib.import_module("peft")
    tuned = load_policies(policies, TOWN)
    texts: dict[int, list[str]] = {}
    for member in (0, 1, 0):
        written = sample_distinct(tuned.samplers[member], "tea ?", 4, SHORT).responses
        alone = LocalModel(str(llama))
        alone.model = peft.PeftModel.from_pretrained(alone.model, policies / f"member-{member}").eval()
        assert written == sample_distinct(alone, "tea ?", 4, SHORT).responses
        assert texts.setdefault(member, written) == written, "the same again after another policy wrote"
    assert texts[0] != texts[1]
    assert tuned.missing == ()


def test_the_base_without_adapters_writes_as_before_after_policies_wrote(policies: Path, llama: Path) -> None:
    tuned = load_policies(policies, TOWN)
    plain = sample_distinct(LocalModel(str(llama)), "tea ?", 4, SHORT).responses
    assert sample_distinct(tuned.base, "tea ?", 4, SHORT).responses == plain
    assert sample_distinct(tuned.samplers[1], "tea ?", 4, SHORT).responses != plain
    assert sample_distinct(tuned.base, "tea ?", 4, SHORT).responses == plain


def test_all_policies_share_one_base_in_memory(policies: Path) -> None:
    tuned = load_policies(policies, TOWN)
    tuned.prepare()
    first, second = tuned.samplers[0], tuned.samplers[1]
    assert isinstance(first, AdapterPolicy)
    assert isinstance(second, AdapterPolicy)
    assert isinstance(tuned.base, AdapterPolicy)
    assert first.model is second.model is tuned.base.model
    assert sorted(first.model.peft_config) == ["member-0", "member-1"]


def test_the_default_temperature_is_that_of_the_tuning_and_lower_for_small_models(policies: Path) -> None:
    local = load_policies(policies, TOWN).samplers[0]
    assert isinstance(local, AdapterPolicy)
    assert local.with_defaults(SamplingOptions()).temperature == 0.7
    assert local.with_defaults(SamplingOptions(temperature=1.3)).temperature == 1.3
    served: Any = load_policies(policies, TOWN, RemoteOptions(base_url="http://127.0.0.1:9/v1")).samplers[0]
    assert served.with_defaults(SamplingOptions()).temperature == 1.0
    assert served.with_defaults(SamplingOptions(temperature=1.3)).temperature == 1.3


@pytest.mark.parametrize("mode", ["balanced", "distributional"])
def test_answers_are_reproducible_by_seed(policies: Path, mode: Any) -> None:
    def texts(seed: int) -> list[str]:
        own, sampling = load_policies(policies, TOWN).samplers, SamplingOptions(max_new_tokens=8)
        found = answer(TOWN, "tea ?", None, mode, policies=own, sampling=sampling, seed=seed)
        return [entry.text for entry in found.answers]

    assert texts(3) == texts(3)
    assert len({tuple(texts(seed)) for seed in range(6)}) > 1


# --- manifests that do not fit ----------------------------------------------------------------------------------------


def test_policies_of_another_ensemble_are_rejected(policies: Path) -> None:
    with pytest.raises(DataError, match="its policies were tuned to another ensemble; name the folder"):
        load_policies(policies, ensemble_of("full stops", "question marks"))
    with pytest.raises(DataError, match="tuned to an ensemble of 2 members, but this one has 1"):
        load_policies(policies, ensemble_of("full stops", weights=(1.0,)))


def test_folders_without_finished_policies_are_rejected(policies: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no manifest\.json; name a folder that pluralign tune wrote"):
        load_policies(tmp_path, TOWN)
    manifest = json.loads((policies / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="pluralign tune did not write this file"):
        load_policies(tmp_path / "manifest.json", TOWN)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"members": []}))
    with pytest.raises(DataError, match="no policy is finished; run pluralign tune again"):
        load_policies(tmp_path, TOWN)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="its adapters are missing"):
        load_policies(tmp_path, TOWN)
    manifest["members"][0]["path"] = "../elsewhere"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="which tune does not write"):
        load_policies(tmp_path, TOWN)


def test_a_missing_adapter_leaves_its_member_to_the_base_and_a_damaged_one_is_named(
    policies: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(policies, tmp_path / "copy")
    shutil.rmtree(copy / "member-1")
    tuned = load_policies(copy, TOWN)
    assert (sorted(tuned.samplers), tuned.missing) == ([0], (1,))
    (copy / "member-0" / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"member-0: peft cannot load the adapter .*; run pluralign tune again"):
        load_policies(copy, TOWN).prepare()


# --- on a server ------------------------------------------------------------------------------------------------------


def adapters(*names: str) -> Reply:
    return Reply({"data": [{"id": name} for name in names]})


def by_name(request: Request) -> Reply:
    marks = {"member-0": "?", "member-1": "."}.get(request["model"])
    if marks is None:
        return fails(404, "no such model")
    return says(*(f"{request['model']} {marks * (i + 1)}" for i in range(request.get("n", 1))))


def test_a_server_is_asked_for_the_adapter_of_each_member(policies: Path, serve: Serve) -> None:  # noqa: F811
    server = serve(by_name, adapters("base", "member-0", "member-1"))
    tuned = load_policies(policies, TOWN, RemoteOptions(base_url=server.url))
    tuned.prepare()
    found = answer(TOWN, "tea ?", policies=tuned.samplers, n=3)
    assert sorted((entry.text, entry.member) for entry in found.answers) == [("member-0 ???", 0), ("member-1 ...", 1)]
    assert sorted(request["model"] for request in server.requests) == ["member-0", "member-1"]
    assert {request["temperature"] for request in server.requests} == {1.0}


def test_a_server_without_the_adapters_is_an_error_that_names_the_manifest(
    policies: Path,
    serve: Serve,  # noqa: F811
) -> None:
    server = serve(by_name, adapters("base"))
    tuned = load_policies(policies, TOWN, RemoteOptions(base_url=server.url))
    with pytest.raises(UsageError, match=r"has no model 'member-0'; serve the adapters with the command in .*json"):
        tuned.prepare()


# --- on the command line ----------------------------------------------------------------------------------------------


def test_the_command_answers_with_policies_in_this_process(policies: Path, ensemble_folder: Path) -> None:
    command = ["answer", str(ensemble_folder), "tea ?", "--policies", str(policies), "--max-new-tokens", "8", "--json"]
    found = json.loads(run(*command).stdout)
    assert found["written"] == [0, 1]
    assert found == json.loads(run(*command).stdout)
    steered = json.loads(run(*command, "--mode", "steerable", "--member", "1", "-n", "3").stdout)
    assert (steered["written"], steered["candidates"]) == ([1], 3)
    assert "written by its policy" in run(*command[:-1]).stdout


def test_the_command_uses_the_base_for_members_without_a_policy(
    policies: Path, ensemble_folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(policies, tmp_path / "copy")
    shutil.rmtree(copy / "member-1")
    command = ["answer", str(ensemble_folder), "tea ?", "--policies", str(copy), "--max-new-tokens", "8", "--json"]
    found = json.loads(run(*command).stdout)
    assert found["written"] == [0]
    assert "member 1 has no answer of a policy and chooses among 8 shared candidates" in found["notes"]


def test_the_command_asks_the_server_for_adapters(
    policies: Path,
    ensemble_folder: Path,
    serve: Serve,  # noqa: F811
) -> None:
    server = serve(by_name, adapters("member-0", "member-1"))
    command = ["answer", str(ensemble_folder), "tea ?", "--policies", str(policies), "--base-url", server.url]
    found = json.loads(run(*command, "--mode", "distributional", "--json").stdout)
    assert found["answers"][0]["text"].startswith(f"member-{found['answers'][0]['member']}")
    assert len(server.requests) == 1


def test_the_command_refuses_other_policies_in_one_sentence(policies: Path, tmp_path: Path) -> None:
    ensemble_of("full stops", "question marks").save(tmp_path)
    result = run("answer", str(tmp_path), "tea ?", "--policies", str(policies))
    assert result.returncode == 2
    assert "its policies were tuned to another ensemble" in result.stderr
