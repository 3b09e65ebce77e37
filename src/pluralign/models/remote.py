"""Candidates from a server that speaks OpenAI's chat completions: vLLM, Ollama, llama.cpp, a hosted model.

Decided here: what is asked of a server, which of its refusals are got round, and which sentence each failure becomes.
What a prompt fails by is a ``DataError`` and costs that prompt; what every prompt would fail by is a ``UsageError`` and
ends the work. Requests are tried again by the ``openai`` client: its waits double, vary by chance and obey a server's
Retry-After. The key never leaves this module but to the server.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pluralign.core.errors import DataError, MissingExtraError, UsageError, did_you_mean
from pluralign.models.options import RemoteOptions, SamplingOptions
from pluralign.votes.prompts import Prompt, PromptLike

RETRIES = 5
"""How often a request is tried again that timed out, was cut off, or met a busy (429) or broken (5xx) server."""
CONNECT_SECONDS = 10.0
REACH_SECONDS = 30.0
"""Most time for the list of models, by which a server is known to be there."""
CHOICES_AT_ONCE = 100
"""Most responses asked for in one request; a server that gives fewer is asked for as many as it gave."""
MOST_BYTES = 2**25
"""Longest answer that is read: 100 responses of 80,000 characters each."""
SEEDS = 2**31
"""Seeds are below this, which every server can hold."""
NO_KEY = "none"
"""Sent where there is no key: servers that ask for none ignore it, and the client insists on one."""

_TOO_LONG = re.compile(r"context.{0,10}(length|window|size)|(prompt|input|request|message)s? (is|are) too (long|large)")
_ABOUT_N = re.compile(r"(?<!\\)\bn\b|multiple|only one")
_ABOUT_CONTENT = re.compile(r"flagged|moderation|content|safety")


class CutOff(str):
    """A response that stops where it became too long, and not where its writer would have ended it."""

    __slots__ = ()


class ServerModel:
    """A model behind a server; several threads may sample from it at once."""

    def __init__(self, model: str, options: RemoteOptions) -> None:
        self.model, self.options = model, options
        self._client: Any = None
        self._lock = threading.Lock()
        # What the server has taught us so far.
        self._at_once = CHOICES_AT_ONCE
        self._takes_seed = True
        self._limit = "max_tokens"

    @property
    def name(self) -> str:
        """The model with its server, so that a file of candidates is gone on with only from the same."""
        return f"{self.model} at {self.options.base_url}"

    def prepare(self) -> None:
        """Reach the server, or say at once that nobody answers or that the key is refused."""
        self._models()

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[str]:
        """Return n responses, some perhaps empty, some perhaps ``CutOff`` at the longest length."""
        texts: list[str] = []
        while len(texts) < n:
            wanted = min(n - len(texts), self._at_once)
            said = self._ask(prompt, wanted, options, (seed + len(texts)) % SEEDS)
            if len(said) < wanted:
                self._at_once = min(len(said), self._at_once)
            texts += said[:wanted]
        return texts

    def _ask(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[str]:
        client, openai = self._connected(), _openai(self.options)
        request = self._request(prompt, n, options, seed)
        try:
            answer = client.chat.completions.with_raw_response.create(**request)
        except openai.APIStatusError as error:
            if error.status_code in (400, 422) and self._gives_way(error.body, request):
                return self._ask(prompt, min(n, self._at_once), options, seed)
            raise self._failure(error) from None
        except openai.APITimeoutError:
            problem = f"the server did not answer within {self.options.timeout:g} s, in any of {RETRIES + 1} tries"
            raise DataError(problem, remedy="allow a longer --timeout, or ask for less") from None
        except openai.APIConnectionError:
            self._models()  # ends the work if nobody is there any more
            raise DataError("the server broke off each of its answers", remedy="see its own log") from None
        return read_choices(answer.content, self._clean)

    def _request(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self.model, "messages": Prompt(prompt).messages}
        request |= {"temperature": options.temperature, self._limit: options.max_new_tokens}
        if options.top_p < 1:
            request["top_p"] = options.top_p
        if n > 1:
            request["n"] = n
        if self._takes_seed:
            request["seed"] = seed
        return request

    def _gives_way(self, body: object, request: Mapping[str, Any]) -> bool:
        """Learn from a refusal what this server does not take; say whether to ask again without it."""
        said = json.dumps(body).lower()
        if _TOO_LONG.search(said):
            return False
        if "max_tokens" in request and "max_completion_tokens" in said:
            self._limit = "max_completion_tokens"
        elif "seed" in request and re.search(r"\bseed\b", said):
            self._takes_seed = False
        elif "n" in request and _ABOUT_N.search(said):
            self._at_once = 1
        else:
            return False
        return True

    def _failure(self, error: Any) -> DataError | UsageError:
        status, reason = error.status_code, self._reason(error.body)
        at = self.options.base_url
        if status == 404:
            return self._nothing_there(reason)
        if status in (401, 402) or error.code == "insufficient_quota":
            return self._refused(reason)
        if status == 403 and not _ABOUT_CONTENT.search(reason.lower()):
            return self._refused(reason)
        if status == 413 or (status in (400, 422) and _TOO_LONG.search(json.dumps(error.body).lower())):
            remedy = "shorten it or lower --max-new-tokens"
            return DataError(f"the prompt is longer than the model at {at} reads ({reason})", remedy=remedy)
        if status == 429 or status >= 500:
            remedy = "lower --concurrency, or try again later" if status == 429 else "see its own log"
            return DataError(f"the server answered {status} until it was given up ({reason})", remedy=remedy)
        return DataError(f"the server refuses the prompt with {status} ({reason})")

    def _refused(self, reason: str) -> UsageError:
        sent = f"the key in {self.options.api_key_env}" if self._key() != NO_KEY else "a request without a key"
        return UsageError(
            f"the server at {self.options.base_url} refuses {sent} ({reason}); "
            "put a valid key into an environment variable and name it with --api-key-env."
        )

    def _nothing_there(self, reason: str) -> UsageError:
        known = self._models()
        if known and self.model not in known:
            hint = self._clean(did_you_mean(self.model, known))
            return UsageError(f"the server at {self.options.base_url} has no model {self.model!r}; {hint}.")
        return UsageError(
            f"the server at {self.options.base_url} does not know chat completions of {self.model} ({reason}); "
            "most base URLs end in /v1."
        )

    def _models(self) -> list[str]:
        """The models that the server lists, none where it does not say; a ``UsageError`` where nobody answers."""
        openai = _openai(self.options)
        client = self._connected().with_options(timeout=REACH_SECONDS, max_retries=1)
        try:
            listed = json.loads(client.models.with_raw_response.list().content)
            return [str(one["id"]) for one in listed["data"]]
        except openai.AuthenticationError as error:
            raise self._refused(self._reason(error.body)) from None
        except openai.APIConnectionError as error:
            why = self._clean(str(error.__cause__ or "")) or "no reason is known"
            raise UsageError(
                f"no server answers at {self.options.base_url} ({why}); start it, or check --base-url."
            ) from None
        except (openai.APIStatusError, ValueError, RecursionError, KeyError, TypeError):  # DataError is a ValueError
            return []

    # --- the client and its key -------------------------------------------------------------------------------------

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                openai = _openai(self.options)
                self._client = openai.OpenAI(
                    api_key=self._key(),
                    base_url=self.options.base_url,
                    timeout=openai.Timeout(self.options.timeout, connect=CONNECT_SECONDS),
                    max_retries=RETRIES,
                    http_client=openai.DefaultHttpxClient(event_hooks={"response": [_bound(self.options.timeout)]}),
                )
            return self._client

    def _key(self) -> str:
        variable = self.options.api_key_env
        key = os.environ.get(variable, "").strip()
        if not key and variable != RemoteOptions.api_key_env:
            raise UsageError(f"the environment variable {variable} holds no key; set it, or leave --api-key-env out.")
        if not (key.isascii() and key.isprintable()):
            raise UsageError(f"the environment variable {variable} holds characters that no key can have.")
        return key or NO_KEY

    def _reason(self, body: object) -> str:
        """What a server says of an error, in one line."""
        said = body
        while isinstance(said, Mapping):
            said = next((said[name] for name in ("message", "error", "detail") if said.get(name)), "no reason given")
        text = self._clean(str(said or "no reason given"))
        return "it sent a web page" if text.startswith("<") else text

    def _clean(self, text: str) -> str:
        """One short line without the key and without characters that steer terminals."""
        key = self._key()
        text = text.replace(key, "[key]") if key != NO_KEY else text
        return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())[:200]


def read_choices(body: bytes, clean: Callable[[str], str] = str.strip) -> list[str]:
    """Return the texts in a server's answer, at least one; an absent text is an empty one.

    A text whose ``finish_reason`` is ``length`` is a ``CutOff``.

    Example:
        >>> read_choices(b'{"choices": [{"message": {"content": "Yes."}}, {"message": {"content": null}}]}')
        ['Yes.', '']
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        start = clean(body[:40].decode(errors="replace"))
        remedy = "check that --base-url is the address of an API, mostly ending in /v1"
        raise DataError(f"the server's answer is not JSON (it begins with {start!r})", remedy=remedy) from None
    try:
        texts = [choice["message"].get("content") for choice in answer["choices"]]
        kinds = [CutOff if choice.get("finish_reason") == "length" else str for choice in answer["choices"]]
    except (KeyError, TypeError, AttributeError):
        said = answer.get("error") if isinstance(answer, Mapping) else None
        reason = f" ({clean(json.dumps(said, ensure_ascii=False))})" if said else ""
        raise DataError(f"the server's answer has no choices with a message each{reason}") from None
    if not texts:
        raise DataError("the server's answer has an empty list of choices")
    if not all(text is None or isinstance(text, str) for text in texts):
        raise DataError("the server's answer has a message whose content is not a text")
    sound = [(text or "").encode(errors="replace").decode() for text in texts]  # half a surrogate pair is no text
    return [kind(text) for kind, text in zip(kinds, sound, strict=True)]


def _openai(options: RemoteOptions) -> Any:
    try:
        import openai
    except ImportError:
        raise MissingExtraError("openai", "server", f"the server {options.base_url}") from None
    return openai


def _bound(seconds: float) -> Callable[[Any], None]:
    """Return a hook for responses whose bodies are read within a size and, from their beginning, a time."""

    def bound(response: Any) -> None:
        whole, until = response.iter_bytes, time.monotonic() + seconds

        def bounded(chunk_size: int | None = None) -> Iterator[bytes]:
            n_bytes = 0
            for part in whole(chunk_size):
                n_bytes += len(part)
                if n_bytes > MOST_BYTES:
                    raise DataError(f"the server's answer is longer than {MOST_BYTES / 2**20:g} MB")
                if time.monotonic() > until:  # the client's own limit is for each part alone
                    remedy = "allow a longer --timeout, or ask for less"
                    raise DataError(f"the server had not finished its answer after {seconds:g} s", remedy=remedy)
                yield part

        response.iter_bytes = bounded

    return bound
