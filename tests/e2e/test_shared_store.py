"""Two `kvsteward serve` over one Valkey: one is killed, the other goes on; and the commands that look into the store."""

from __future__ import annotations

import json
import subprocess
import sys

from typer.testing import CliRunner

from kvsteward.cli import app
from valkey_server import free_port


def user(text):
    return {"role": "user", "content": text}


def command(*words, **env):
    return CliRunner().invoke(app, words, env=env)


def test_a_gateway_is_killed_and_the_session_goes_on_at_another(serve, valkey_server):
    options = ("--engine", "scripted", "--store", valkey_server.url)
    one, two = serve(*options), serve(*options)
    history = [user("My parcel is W-4711.")]
    answer = one.chat(history, session="s")["choices"][0]["message"]
    one.child.kill()
    one.child.wait()
    history += [answer, user("Where is it?")]
    assert two.chat(history, session="s")["choices"][0]["message"]["content"]
    log = two.get("/v1/sessions/s/log")["data"]
    assert [entry["message"]["content"] for entry in log[:3]] == [message["content"] for message in history]
    assert two.get("/v1/sessions/s")["turns"] == 2
    assert "W-4711" in two.get("/v1/sessions/s/recall?query=parcel")["text"]

    listed = command("sessions", "list", "--json", KVSTEWARD_STORE=valkey_server.url)
    assert [(row["id"], row["turns"], row["state"]) for row in json.loads(listed.stdout)] == [("s", 2, "idle")]
    clean = command("sessions", "verify", "--store", valkey_server.url)
    assert (clean.exit_code, clean.stdout.strip().splitlines()[-1]) == (0, "clean")
    valkey_server.client.hset("kvs:1:{s}:raw", log[0]["hash"], b'{"role":"user","content":"My parcel is W-4712."}')
    spoilt = command("sessions", "verify", "--store", valkey_server.url)
    assert spoilt.exit_code == 1
    assert log[0]["hash"][:12] in spoilt.stdout


def test_a_server_that_is_not_there_is_told_at_the_start():
    port = free_port()
    words = ("serve", "--engine", "scripted", "--port", "0", "--store", f"valkey://:hush@127.0.0.1:{port}/0")
    told = subprocess.run([sys.executable, "-m", "kvsteward", *words], capture_output=True, text=True, timeout=60)
    assert told.returncode != 0
    assert f"valkey://127.0.0.1:{port}/0 cannot be reached" in told.stderr
    assert "Check that the store's server runs" in told.stderr
    assert "hush" not in told.stderr
    assert "Traceback" not in told.stderr
