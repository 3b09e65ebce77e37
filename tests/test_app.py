"""The application: the page's data, the description of the API, metrics, and arguments that raise."""

import math
import re
from collections.abc import Iterator

import pytest
from served import Client, running

from pluralign import RewardEnsemble, UsageError, create_app
from pluralign.server.app import FiniteJSONResponse
from pluralign.server.limits import Limits


@pytest.fixture(scope="module")
def client(ensemble: RewardEnsemble) -> Iterator[Client]:
    with running(ensemble) as client:
        yield client


def test_the_page_data_is_served(client: Client, ensemble: RewardEnsemble) -> None:
    shown = client.json("/v1/ensemble")
    assert (shown["name"], shown["k"], shown["can_generate"]) == ("town", 3, False)
    assert shown["modes"] == ["balanced", "steerable", "distributional"]
    assert shown["limits"]["candidates"] == Limits().candidates
    assert len(shown["members"]) == 3


def test_the_api_description_is_complete_and_loads_nothing_external(client: Client) -> None:
    described = client.json("/openapi.json")["paths"]
    listing = client.send("/docs")[2].decode()
    for path in (
        "/v1/chat/completions",
        "/v1/compare",
        "/v1/score",
        "/rerank",
        "/v2/rerank",
        "/get_reward",
        "/metrics",
    ):
        assert path in described
        assert path in listing
    assert "<script" not in listing
    assert not re.search(r"(src|href)=\"(https?:)?//", listing)


def test_every_route_has_a_response_schema(client: Client) -> None:
    described = client.json("/openapi.json")
    schemas = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        for route in methods.values():
            (media_type, content), *_ = route["responses"]["200"]["content"].items()
            if path == "/metrics":
                assert media_type == "text/plain"
                continue
            schema = content["schema"].get("items", content["schema"])
            assert schemas[schema["$ref"].rpartition("/")[2]]["description"], path
            error = route["responses"]["422"]["content"]["application/json"]["schema"]["$ref"]
            assert error == "#/components/schemas/ErrorBody"


def test_numbers_that_are_not_finite_become_null() -> None:
    assert FiniteJSONResponse({"noise": math.nan, "k": [1, math.inf]}).body == b'{"noise": null, "k": [1, null]}'


def test_unknown_paths_share_one_metric_label(client: Client) -> None:
    for n in range(5):
        client.send(f"/made-up-{n}")
    lines = client.send("/metrics")[2].decode()
    assert "made-up" not in lines
    assert 'route="other",status="404"' in lines


def test_a_name_unfit_for_model_ids_raises(ensemble: RewardEnsemble) -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        create_app(ensemble, name="a:b")


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\n"])
def test_an_api_key_unfit_for_headers_raises(ensemble: RewardEnsemble, key: str) -> None:
    with pytest.raises(UsageError, match="the API key must have"):
        create_app(ensemble, api_key=key)
