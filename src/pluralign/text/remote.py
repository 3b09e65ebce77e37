"""Language models behind a server of OpenAI's chat completions API: vLLM, Ollama, llama.cpp or a hosted model.

Decided here: the request, the errors that are retried with other parameters, and the sentence for each failure. A
failure of one prompt is a ``DataError`` and costs only that prompt. A failure that every prompt would meet is a
``UsageError`` and ends the run. The ``openai`` client retries requests, with random, doubling waits, and obeys a
server's Retry-After. The API key is sent to the server and appears nowhere else.
"""

import json
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from pluralign.core.errors import DataError, MissingExtraError, UsageError, did_you_mean
from pluralign.core.text import one_line
from pluralign.text.causal import Choice, Completion, LocalModel
from pluralign.text.options import RemoteOptions, SamplingOptions
from pluralign.votes.prompts import Prompt, PromptLike

RETRIES = 5
"""How often the client repeats a request that timed out, lost its connection, or met a busy (429) or failing (5xx)
server."""
CONNECT_SECONDS = 10.0
REACH_SECONDS = 30.0
"""Timeout for the list of models, which shows that the server is reachable."""
MAX_CHOICES = 100
"""Maximum number of responses per request. If a server returns fewer, later requests ask for that number."""
MAX_BYTES = 2**25
"""Maximum size of a reply: 100 responses of 80,000 characters each."""
SEEDS = 2**31
"""Seeds are below this number, which every server accepts."""
CHOICE_TOKENS = 8
"""Maximum length of an answer that is one letter; some models write a word or a space before it."""
LOG_PROBS = {"logprobs": True, "top_logprobs": 5}
NO_KEY = "none"
"""Sent instead of an API key. The client requires a key; servers without authentication ignore it."""

_TOO_LONG = re.compile(r"context.{0,10}(length|window|size)|(prompt|input|request|message)s? (is|are) too (long|large)")
_REJECTIONS = {
    "max_tokens": r"max_completion_tokens",
    "seed": r"\bseed\b",
    "logprobs": r"logprob",
    "temperature": r"temperature",
    "n": r"(?<!\\)\bn\b|multiple|only one",
}
"""Patterns of error messages, by the setting that the server rejects."""
Key = TypeVar("Key", str, int)
Result = TypeVar("Result")
_ABOUT_CONTENT = re.compile(r"flagged|moderation|content|safety")


def language_model(name: str, remote: RemoteOptions | None = None) -> "LocalModel | ServerModel":
    """Return a language model: on a server if ``remote`` has a base URL, else in this process."""
    return ServerModel(name, remote) if remote and remote.base_url else LocalModel(name)


class ServerModel:
    """A model behind a server. Several threads may sample from it at the same time."""

    def __init__(self, model: str, options: RemoteOptions) -> None:
        self.model, self.options = model, options
        self._client: Any = None
        self._lock = threading.Lock()
        # Learned from the server's replies.
        self._max_choices = MAX_CHOICES
        self._rejected: set[str] = set()

    @property
    def name(self) -> str:
        """The model and its server. A candidates file resumes only with the same name."""
        return f"{self.model} at {self.options.base_url}"

    def prepare(self) -> None:
        """Reach the server. Raises UsageError if it does not answer or rejects the API key."""
        self._models()

    def with_defaults(self, options: SamplingOptions) -> SamplingOptions:
        """Return the options with the temperature for this model, if none was given."""
        return options.with_defaults(small=False)

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        """Return n sampled responses; their texts may be empty.

        Raises:
            DataError: the server does not answer this prompt.
            UsageError: the server would not answer any prompt.
        """
        completions: list[Completion] = []
        options = self.with_defaults(options)
        settings: dict[str, Any] = {"temperature": options.temperature, "max_tokens": options.max_new_tokens}
        settings |= {} if options.top_p == 1 else {"top_p": options.top_p}
        while len(completions) < n:
            requested = min(n - len(completions), self._max_choices)
            settings |= {"n": requested, "seed": (seed + len(completions)) % SEEDS}
            choices = read_choices(self._post(prompt, settings), self._clean)
            if len(choices) < requested:
                self._max_choices = min(len(choices), self._max_choices)
            completions += choices[:requested]
        return completions

    def choose(self, prompt: PromptLike, letters: Sequence[str]) -> Choice:
        """Return the probability of the first of two letters: from log-probabilities, or 1 or 0 from the text.

        Raises:
            DataError: the server does not answer this prompt.
            UsageError: the server would not answer any prompt.
        """
        settings = {"temperature": 0, "max_tokens": CHOICE_TOKENS, **LOG_PROBS}
        return read_choice(self._post(prompt, settings), letters, self._clean)

    def _post(self, prompt: PromptLike, settings: Mapping[str, Any]) -> bytes:
        """Return the body of the reply; a setting that the server rejects is left out, and the request repeated."""
        client, openai, sent = self._connected(), _openai(self.options), self._accepted(settings)
        messages = Prompt(prompt).messages
        try:
            reply = client.chat.completions.with_raw_response.create(model=self.model, messages=messages, **sent)
        except openai.APIStatusError as error:
            if error.status_code in (400, 422) and self._is_rejected(sent, error.body):
                return self._post(prompt, settings)
            raise self._failure(error) from None
        except openai.APITimeoutError:
            problem = f"the server did not answer within {self.options.timeout:g} s, in any of {RETRIES + 1} attempts"
            raise DataError(problem, remedy="use a longer --timeout, or request fewer or shorter responses") from None
        except openai.APIConnectionError:
            self._models()  # raises UsageError if the server is gone
            problem = "the server closed the connection on every attempt"
            raise DataError(problem, remedy="see the server's log") from None
        return bytes(reply.content)

    def _accepted(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings without those that the server has rejected."""
        sent = {name: value for name, value in settings.items() if name not in self._rejected}
        if "max_tokens" in self._rejected:
            sent["max_completion_tokens"] = settings["max_tokens"]
        if settings["temperature"]:  # only 0 can be rejected
            sent["temperature"] = settings["temperature"]
        if sent.get("n") == 1:
            del sent["n"]
        return sent

    def _is_rejected(self, sent: Mapping[str, Any], error: object) -> bool:
        """Learn from an error which setting the server rejects. Return whether there is one."""
        message = json.dumps(error).lower()
        optional = sent.keys() - ({"temperature"} if sent.get("temperature") else set())
        found = [name for name, sign in _REJECTIONS.items() if name in optional and re.search(sign, message)]
        if not found or _TOO_LONG.search(message):
            return False
        self._rejected |= set(LOG_PROBS) if found[0] == "logprobs" else {found[0]}
        return True

    # --- errors -----------------------------------------------------------------------------------------------------

    def _failure(self, error: Any) -> DataError | UsageError:
        status, reason = error.status_code, self._reason(error.body)
        if status == 404:
            return self._not_found(reason)
        is_forbidden = status == 403 and not _ABOUT_CONTENT.search(reason.lower())
        if status in (401, 402) or error.code == "insufficient_quota" or is_forbidden:
            return self._rejected_key(reason)
        if status == 413 or (status in (400, 422) and _TOO_LONG.search(json.dumps(error.body).lower())):
            problem = f"the prompt is too long for the model at {self.options.base_url} ({reason})"
            return DataError(problem, remedy="shorten the prompt or lower --max-new-tokens")
        if status == 429 or status >= 500:
            remedy = "lower --concurrency, or try again later" if status == 429 else "see the server's log"
            return DataError(f"the server answered {status} on every attempt ({reason})", remedy=remedy)
        return DataError(f"the server rejects the prompt with {status} ({reason})")

    def _rejected_key(self, reason: str) -> UsageError:
        sent = f"the key in {self.options.api_key_env}" if self._key() != NO_KEY else "a request without a key"
        return UsageError(
            f"the server at {self.options.base_url} rejects {sent} ({reason}); "
            "put a valid key into an environment variable and name it with --api-key-env."
        )

    def _not_found(self, reason: str) -> UsageError:
        known = self._models()
        if known and self.model not in known:
            hint = self._clean(did_you_mean(self.model, known))
            return UsageError(f"the server at {self.options.base_url} has no model {self.model!r}; {hint}.")
        return UsageError(
            f"the server at {self.options.base_url} has no chat completions for {self.model} ({reason}); "
            "check --base-url: most base URLs end in /v1."
        )

    def _models(self) -> list[str]:
        """Return the models that the server lists, or nothing if it has no list. Raises UsageError if it is down."""
        openai = _openai(self.options)
        client = self._connected().with_options(timeout=REACH_SECONDS, max_retries=1)
        try:
            listed = json.loads(client.models.with_raw_response.list().content)
            return [str(one["id"]) for one in listed["data"]]
        except openai.AuthenticationError as error:
            raise self._rejected_key(self._reason(error.body)) from None
        except openai.APIConnectionError as error:
            reason = self._clean(str(error.__cause__ or "")) or "unknown reason"
            server = f"{self.options.base_url} ({reason})"
            raise UsageError(f"no server answers at {server}; start it, or check --base-url.") from None
        except (openai.APIStatusError, ValueError, RecursionError, KeyError, TypeError):  # DataError is a ValueError
            return []

    def _reason(self, body: object) -> str:
        """Return the server's error message on one line."""
        message = body
        while isinstance(message, Mapping):
            fields = [message[name] for name in ("message", "error", "detail") if message.get(name)]
            message = fields[0] if fields else "no reason given"
        text = self._clean(str(message or "no reason given"))
        return "it sent a web page" if text.startswith("<") else text

    def _clean(self, text: str) -> str:
        """Return one short line, without the API key and without control characters."""
        key = self._key()
        text = text.replace(key, "[key]") if key != NO_KEY else text
        return one_line("".join(sign if sign.isprintable() else " " for sign in text))

    # --- the client and its key -------------------------------------------------------------------------------------

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                openai, url, seconds = _openai(self.options), self.options.base_url, self.options.timeout
                http = openai.DefaultHttpxClient(event_hooks={"response": [_limit_body(seconds)]})
                timeout = openai.Timeout(seconds, connect=CONNECT_SECONDS)
                self._client = openai.OpenAI(
                    api_key=self._key(), base_url=url, timeout=timeout, max_retries=RETRIES, http_client=http
                )
            return self._client

    def _key(self) -> str:
        variable = self.options.api_key_env
        key = os.environ.get(variable, "").strip()
        if not key and variable != RemoteOptions.api_key_env:
            raise UsageError(f"the environment variable {variable} has no key; set it, or leave --api-key-env out.")
        if not (key.isascii() and key.isprintable()):
            raise UsageError(f"the environment variable {variable} has characters that no key can have; correct it.")
        return key or NO_KEY


def read_choices(body: bytes, clean: Callable[[str], str] = str.strip) -> list[Completion]:
    """Return the responses in a server's reply, at least one. A missing text is read as an empty one.

    Args:
        body: JSON of a chat completion.
        clean: removes secrets and control characters from quotes in error messages.

    Example:
        >>> read_choices(b'{"choices": [{"message": {"content": "Yes, and"}, "finish_reason": "length"}]}')
        [Completion(text='Yes, and', finish_reason='length')]
    """
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        start = clean(body[:40].decode(errors="replace"))
        remedy = "check that --base-url is the address of an API; most end in /v1"
        raise DataError(f"the server's reply is not JSON (it begins with {start!r})", remedy=remedy) from None
    try:
        choices = [(choice["message"].get("content"), choice.get("finish_reason")) for choice in reply["choices"]]
    except (KeyError, TypeError, AttributeError):
        error = reply.get("error") if isinstance(reply, Mapping) else None
        reason = f" ({clean(json.dumps(error, ensure_ascii=False))})" if error else ""
        raise DataError(f"the server's reply has no choices with a message each{reason}") from None
    if not choices:
        raise DataError("the server's reply has an empty list of choices")
    if not all(text is None or isinstance(text, str) for text, _ in choices):
        raise DataError("the server's reply has a message whose content is not a text")
    return [
        # Half a surrogate pair cannot be encoded; it becomes a question mark.
        Completion((text or "").encode(errors="replace").decode(), reason if isinstance(reason, str) else None)
        for text, reason in choices
    ]


def read_choice(body: bytes, letters: Sequence[str], clean: Callable[[str], str] = str.strip) -> Choice:
    """Return the probability of the first of two letters in a server's reply.

    It is that of the first token among the likeliest ones, if the reply has log-probabilities of both letters or of
    one. Else it is 1 or 0 by the first of the letters that stands alone in the text, or NaN if there is none.

    Example:
        >>> read_choice(b'{"choices": [{"message": {"content": "Response B."}}]}', ("A", "B")).prob
        0.0
    """
    text = read_choices(body, clean)[0].text
    reply = json.loads(body)
    usage = reply.get("usage") if isinstance(reply.get("usage"), Mapping) else {}
    read, written = (_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    try:
        likeliest = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        tokens = [(one["token"].strip(), math.exp(min(one["logprob"], 0.0))) for one in likeliest]
        mass = [sum(prob for token, prob in tokens if token == letter) for letter in letters]
        if sum(mass) > 0:
            return Choice(mass[0] / sum(mass), read, written)
    except (KeyError, IndexError, TypeError, AttributeError):  # the reply has no log-probabilities
        pass
    found = re.search(rf"\b({'|'.join(letters)})\b", text)
    return Choice(math.nan if found is None else float(found[1] == letters[0]), read, written)


def _count(value: object) -> int:
    """Return a number of tokens that a server reports; 0 if it is not a plausible one."""
    return value if isinstance(value, int) and 0 <= value < MAX_BYTES else 0


def _openai(options: RemoteOptions) -> Any:
    try:
        import openai
    except ImportError:
        raise MissingExtraError("openai", "server", f"the server {options.base_url}") from None
    return openai


def _limit_body(seconds: float) -> Callable[[Any], None]:
    """Return a response hook that limits the size of a reply's body, and the time from its first byte to its last."""

    def limit(response: Any) -> None:
        read, deadline = response.iter_bytes, time.monotonic() + seconds

        def limited(chunk_size: int | None = None) -> Iterator[bytes]:
            n_bytes = 0
            for chunk in read(chunk_size):
                n_bytes += len(chunk)
                if n_bytes > MAX_BYTES:
                    raise DataError(f"the server's reply is longer than {MAX_BYTES / 2**20:g} MB")
                if time.monotonic() > deadline:  # the client's own timeout is per chunk
                    remedy = "use a longer --timeout, or request fewer or shorter responses"
                    raise DataError(f"the server did not finish its reply within {seconds:g} s", remedy=remedy)
                yield chunk

        response.iter_bytes = limited

    return limit


# --- Several prompts at a time.


def as_completed(
    work: Callable[[Key], Result], keys: Sequence[Key], concurrency: int
) -> Generator[tuple[Key, Result | DataError]]:
    """Yield each key with the result of ``work``, or with its ``DataError``. Any other error is raised.

    The threads are daemons, and start nothing new after Ctrl-C or an error, so that nobody waits for a slow server.
    """
    if concurrency == 1:
        for key in keys:
            try:
                yield key, work(key)
            except DataError as error:
                yield key, error
        return
    waiting = deque(keys)
    results: SimpleQueue[tuple[Key, Result | Exception]] = SimpleQueue()

    def run() -> None:
        with suppress(IndexError):  # nothing is left
            while True:
                key = waiting.popleft()
                results.put((key, outcome_of(key)))

    def outcome_of(key: Key) -> Result | Exception:
        try:
            return work(key)
        except Exception as error:
            if not isinstance(error, DataError):  # raised in the thread that reads the results, which may be late
                waiting.clear()
            return error

    for _ in range(min(concurrency, len(keys))):
        threading.Thread(target=run, daemon=True).start()
    try:
        for _ in keys:
            key, outcome = results.get()
            if isinstance(outcome, Exception) and not isinstance(outcome, DataError):
                raise outcome
            yield key, outcome
    finally:
        waiting.clear()
