"""A member as a reward function for trainers such as TRL's ``GRPOTrainer``."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pluralign.core.errors import UsageError
from pluralign.votes.prompts import Item, Message, Prompt, PromptLike, text_key

if TYPE_CHECKING:
    from pluralign.ensemble.ensemble import RewardEnsemble

RewardFunc: TypeAlias = Callable[..., list[Any]]
"""Takes prompts and completions, returns one number each. ``list[float]`` is not a ``list[float | None]``, TRL's type.
"""


def member_reward_func(ensemble: "RewardEnsemble", member: int | None) -> RewardFunc:
    """Return one member as a reward function: see ``RewardEnsemble.as_reward_func``."""
    last = ensemble.k - 1
    if member is None:
        raise UsageError(
            f"as_reward_func needs one member, 0 to {last}: members have different scales, so their rewards cannot be "
            "averaged. Train one policy per member."
        )
    if isinstance(member, bool) or not isinstance(member, int) or not 0 <= member <= last:
        raise UsageError(f"member must be 0 to {last}, not {member!r}.")
    score = ensemble.scorer()

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
