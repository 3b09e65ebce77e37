"""Audit a reward model on votes in which people disagree.

The reward model is any ``…ForSequenceClassification`` of transformers (a folder or a hub id), or a file with rows of
{prompt, response, score}. Use votes that it was not trained on.

    python examples/audit_reward_model.py Skywork/Skywork-Reward-V2-Llama-3.1-8B multipref
    python examples/audit_reward_model.py scores.jsonl votes.jsonl
"""

import argparse

import pluralign

READINGS = {"vote": "votes 1[Δr > 0]", "policy": "σ(Δr)", "tempered": "σ(Δr/T), T from other prompts"}


def main() -> None:
    """Print how well the model predicts the shares of votes, beside simple references."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="model folder, hub id, or file of scores")
    parser.add_argument("votes", help="file of votes, hf:ID, multipref, personalllm, helpsteer2, tldr or demo")
    arguments = parser.parse_args()

    votes = pluralign.load_preferences(arguments.votes)
    result = pluralign.evaluate(arguments.model, votes, groups=["length"])

    print(f"{arguments.model} on {result.pairs:,} pairs from {result.prompts:,} prompts\n")
    print(f"{'':34}{'Brier':>8}{'corrected':>11}")
    for name, figures in result.levels.items():
        print(f"{READINGS.get(name, name):34}{figures.brier:8.4f}{figures.brier_corrected:11.4f}")
    for name, title in (("floor", "floor: a perfect single reward"), ("constant_half", "constant ½")):
        reference = result.baselines[name]
        print(f"{title:34}{reference.brier:8.4f}{reference.brier_corrected:11.4f}")
    print(f"{'noise: the true shares':34}{result.test.noise:8.4f}\n")

    print("Share of the majority, by how people split:")
    for name, row in result.majority.items():
        if row.pairs:
            print(f"  {name:10} {row.pairs:6,} pairs   observed {row.people:.2f}   predicted {row.predicted:.2f}")
    if result.worst_group is not None:
        worst = result.worst_group
        print(f"Worst group: {worst.grouping} {worst.name}, corrected Brier {worst.brier_corrected:.4f}")


if __name__ == "__main__":
    main()
