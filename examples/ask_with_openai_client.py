"""Ask a running ``pluralign serve`` with the OpenAI client.

    pluralign serve town --model smollm2                 # in another terminal
    python examples/ask_with_openai_client.py "Should we plant trees?"

Without a language model behind the server, give the candidate answers:

    python examples/ask_with_openai_client.py "Should we plant trees?" --candidate Yes. --candidate No.
"""

import argparse
import os

from openai import OpenAI


def main() -> None:
    """Print the consensus, the slate, and three answers of randomly drawn members."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="address of pluralign serve")
    parser.add_argument("--candidate", action="append", help="answer to choose from; repeatable")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("PLURALIGN_API_KEY", "none"))
    name = client.models.list().data[0].id  # the ensemble; the other ids have a mode after a colon
    extra = {"candidates": arguments.candidate} if arguments.candidate else None

    def ask(mode: str, n: int = 1) -> list[str]:
        completion = client.chat.completions.create(
            model=f"{name}:{mode}",
            messages=[{"role": "user", "content": arguments.question}],
            n=n,
            seed=0,
            extra_body=extra,
        )
        return [choice.message.content or "" for choice in completion.choices]

    print("Consensus:", *ask("consensus"))
    print("\nSlate:", *ask("balanced"), sep="\n")
    print("\nThree random members:", *ask("distributional", n=3), sep="\n  ")


if __name__ == "__main__":
    main()
