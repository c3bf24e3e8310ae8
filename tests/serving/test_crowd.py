"""The live page's synthetic users."""

import json

import httpx


def test_users_come_where_somebody_watches_and_go_when_told(client: httpx.Client) -> None:
    assert client.post("/live/crowd", json={"users": 3}).json()["users"] == 0
    with client.stream("GET", "/live/events") as feed:
        lines = feed.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["type"] == "hello"
        found = client.post("/live/crowd", json={"users": 2}).json()
        assert found == {"users": 2, "most": 8}
        assert client.get("/live/crowd").json() == found
        ids: set[str] = set()
        for line in lines:
            if line:
                rounds = json.loads(line.removeprefix("data: "))["rounds"]
                ids |= {item["id"] for item in rounds}
            if len(ids) >= 3:  # two users, one of whom has asked again
                break
        assert all(name.startswith("crowd-") for name in ids)
        assert client.post("/live/crowd", json={"users": 100}).json()["users"] == 8
        assert client.post("/live/crowd", json={"users": 0}).json()["users"] == 0


def test_a_size_that_is_none_is_refused(client: httpx.Client) -> None:
    answer = client.post("/live/crowd", json={"users": -1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "users"
