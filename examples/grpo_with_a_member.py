"""Use one member of an ensemble as the reward of TRL's GRPOTrainer.

    pluralign fit votes.jsonl -o ensemble
    python examples/grpo_with_a_member.py ensemble prompts.jsonl --member 1 --policy my-org/my-model -o policy

It works for every ensemble, on frozen features or fine-tuned. ``pluralign tune`` does this for every member, with
standardised rewards and a report. This script is for training loops of your own. Without Pluralign on the training
machine, export a fine-tuned member (``pluralign export ensemble -o member-1 --member 1``) and give its folder to TRL:
``reward_funcs="member-1"``.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from pluralign import RewardEnsemble


def main() -> None:
    """Train a policy for a few steps and print the mean reward of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ensemble", help="folder that pluralign fit wrote, or a hub id")
    parser.add_argument("prompts", help="JSON Lines file with a column prompt: texts or messages")
    parser.add_argument("--member", type=int, default=0, help="number of the member")
    parser.add_argument("--policy", required=True, help="language model to train: a folder or a hub id")
    parser.add_argument("-o", "--output", default="policy")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--generations", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-completion-length", type=int, default=256)
    arguments = parser.parse_args()

    prompts = [json.loads(line)["prompt"] for line in Path(arguments.prompts).read_text().splitlines()]
    # As messages: then TRL applies the chat template of the policy.
    chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
    trainer = GRPOTrainer(
        model=arguments.policy,
        reward_funcs=RewardEnsemble.from_pretrained(arguments.ensemble).as_reward_func(arguments.member),
        train_dataset=Dataset.from_dict({"prompt": chats}),
        args=GRPOConfig(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            num_generations=arguments.generations,
            per_device_train_batch_size=arguments.generations,
            max_completion_length=arguments.max_completion_length,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.accelerator.is_available(),
            logging_steps=1,
            report_to=[],
        ),
    )
    trainer.train()
    for row in trainer.state.log_history:
        if "reward" in row:
            print(f"step {row['step']}: mean reward {row['reward']:.3f}")
    trainer.save_model(arguments.output)


if __name__ == "__main__":
    main()
