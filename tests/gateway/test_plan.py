"""Plan through the gateway: classes are read from the request, and the view is the same after a restart."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvsteward.errors import ConfigError
from kvsteward.gateway.settings import Settings, load_tenants

SMALL = {"context_limit_tokens": 1024, "kv_capacity_tokens": 4096}
MARKED = "The customer's cat is called Tom, and the dog Bela."


def user(text, **own):
    return {"role": "user", "content": text, **({"kvsteward": own} if own else {})}


def sent(gateway, index=-1):
    return json.loads(gateway.engine.requests[index].body)


async def test_a_marked_message_is_in_every_view_and_the_engine_sees_no_mark(start):
    gateway = await start(answers=lambda _: "noted and filed away " * 4, **SMALL)
    history = [user("Hello"), {"role": "assistant", "content": "hi"}, user(MARKED, **{"class": "plan"})]
    for turn in range(40):
        answer = await gateway.chat(*history, session="s", max_tokens=64)
        assert answer["status"] == 200, answer
        body = sent(gateway)
        assert any(MARKED in str(m["content"]) for m in body["messages"])
        assert "kvsteward" not in {key for m in body["messages"] for key in m}
        history += [answer["choices"][0]["message"], user(f"Entry {turn}: " + "please file this away. " * 6)]
    view = await gateway.get("/v1/sessions/s/view")
    assert view["dropped_messages"] > 3
    gateway.steward.desk.forget("s")
    assert (await gateway.get("/v1/sessions/s/view"))["messages"] == view["messages"]


async def test_the_class_of_a_request(start):
    gateway = await start(**SMALL)
    fields = {"metadata": {"kvsteward": {"class": "plan"}, "user": "u1"}, "max_tokens": 64}
    first = await gateway.chat(user(MARKED), session="s", **fields)
    history = [user(MARKED), first["choices"][0]["message"]]
    assert sent(gateway)["metadata"] == {"user": "u1"}
    for turn in range(30):
        history.append(user(f"Entry {turn}: " + "please file this away. " * 12))
        answer = await gateway.chat(*history, session="s", max_tokens=64)
        history.append(answer["choices"][0]["message"])
        assert any(MARKED in str(m["content"]) for m in sent(gateway)["messages"])


async def test_a_class_that_does_not_exist_is_refused(start):
    gateway = await start(**SMALL)
    answer = await gateway.chat(user("Hello", **{"class": "plna"}), session="s")
    assert (answer["status"], answer["error"]["param"]) == (400, "messages[0].kvsteward.class")


async def test_a_plan_that_does_not_fit_is_refused_and_kept_in_the_log(start):
    gateway = await start(**SMALL)
    answer = await gateway.chat(user("Hello"), user("never mind the rain " * 400, **{"class": "plan"}), session="s")
    assert (answer["status"], answer["error"]["code"]) == (400, "context_length_exceeded")
    assert len((await gateway.get("/v1/sessions/s/log"))["data"]) == 2


async def test_each_tenant_has_its_policy(start, tmp_path):
    (tmp_path / "house.yaml").write_text("base: legal\nabout: ours\n")
    (tmp_path / "tenants.yaml").write_text(
        "tenants:\n  law: {api_key: k1, policy: house.yaml}\n  shop: {api_key: k2, policy: support}\n"
    )
    keys = await asyncio.to_thread(load_tenants, tmp_path / "tenants.yaml")
    gateway = await start(settings=Settings(keys=keys), **SMALL)
    long = user("The tenant pays on the first. " * 160)
    law = await gateway.chat(long, headers={"Authorization": "Bearer k1"})
    shop = await gateway.chat(long, headers={"Authorization": "Bearer k2"})
    assert (law["status"], law["error"]["code"]) == (400, "context_length_exceeded")
    assert shop["status"] == 200


@pytest.mark.parametrize(("policy", "said"), [("suport", "suport"), ("[1]", "policy")])
def test_a_tenant_with_a_wrong_policy_is_named(tmp_path, policy, said):
    (tmp_path / "tenants.yaml").write_text(f"tenants:\n  law: {{api_key: k1, policy: {policy}}}\n")
    with pytest.raises(ConfigError, match="law") as error:
        load_tenants(tmp_path / "tenants.yaml")
    assert said in error.value.message
