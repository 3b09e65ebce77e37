"""The paper's combination learns: stagewise, printed loss, fresh head, SOAP and no bound (§4, App. Training Pipeline).

It is trained on two camps that prefer different words. Only the numbers of the recipe differ from the paper's: a tiny
model needs a higher learning rate, smaller batches and more than one epoch.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import two_camps, write_backbone

from pluralign.learning.fit import fit
from pluralign.votes.load import load_preferences

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.slow]


def test_the_papers_combination_learns_both_camps(tmp_path: Path) -> None:
    path = tmp_path / "camps.jsonl"
    path.write_text("\n".join(map(json.dumps, two_camps(400))))
    votes = load_preferences(str(path))
    ensemble = fit(
        votes, folder=tmp_path / "town", backbone=str(write_backbone(tmp_path / "llama")),
        method="stagewise", variant="printed", fresh_head=True, optimizer="soap", max_disagreement=1.0, k=3,
        learning_rate=5e-3, batch_size=32, micro_batch=64, epochs=4,
    )  # fmt: skip
    evaluation = ensemble.record.evaluation
    assert evaluation is not None
    one_member = ensemble.record.history[0].test_brier
    assert evaluation.test.brier < 0.4 * evaluation.baselines["constant_half"].brier
    assert evaluation.test.brier < 0.4 * one_member

    held_out = votes[votes.test_mask()]
    for word, most in (("tea", 0.6), ("rum", 0.4)):
        choice = np.array([word in held_out.responses[a].split() for a in held_out.a_index], dtype=float)
        agreement = (ensemble.votes(held_out) == choice[:, None]).mean(axis=0)
        assert agreement.max() > 0.8, f"no member agrees with the camp that prefers {word}"
        assert ensemble.weights[int(agreement.argmax())] == pytest.approx(most, abs=0.2)
