"""What the documents tell a reader to type works: commands parse, the snippet runs, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from kvsteward.cli import app
from kvsteward.context.marks import Policy
from kvsteward.context.policies import dump_policy, parse_policy, presets

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text() for page in PAGES}
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(language: str, *pages: str) -> list[str]:
    """Of the named pages, or of all."""
    texts = [TEXT[page] for page in pages] or list(TEXT.values())
    return [body for text in texts for found, body in BLOCK.findall(text) if found == language]


def commands(program: str) -> list[list[str]]:
    lines = [line for body in blocks("sh") for line in body.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


@pytest.mark.parametrize("command", commands("kvsteward"), ids=" ".join)
def test_every_command_parses(command):
    parser = typer.main.get_command(app)
    context = parser.make_context("kvsteward", command[1:], resilient_parsing=False)
    name, verb, arguments = parser.resolve_command(context, [*context._protected_args, *context.args])
    verb.make_context(name, arguments, parent=context)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {target for line in commands("make") for target in line[1:] if "=" not in target}
    assert {"run", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_python_snippet_runs(serve):
    gateway = serve("--engine", "scripted")
    (snippet,) = blocks("python", "README.md")
    code = snippet.replace("http://127.0.0.1:8080", gateway.url)
    assert code != snippet
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"
    assert gateway.get("/v1/sessions/support-4711")["turns"] == 1


def test_the_snippet_of_the_block_store_runs(tmp_path):
    (snippet,) = blocks("python", "kv-store.md")
    code = snippet.replace("/tmp/kv-blocks", str(tmp_path)).replace("ticket.blocks() ", "print(len(ticket.blocks())) ")
    assert "print(len" in code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
    assert len(list(tmp_path.rglob("*.block"))) == 1


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "RESULTS.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("text", blocks("yaml"), ids=lambda text: text.splitlines()[0])
def test_policies_of_the_documents_are_valid(text):
    policy = parse_policy(text, "the document")
    assert policy != Policy()
    assert parse_policy(dump_policy(policy)) == policy


def test_the_documents_name_the_presets():
    named = set(re.findall(r"^\| `([a-z][a-z-]*)` \|", TEXT["context.md"], re.MULTILINE))
    assert named == set(presets())


def test_help_of_every_command():
    several = [("sessions", "list"), ("engines", "list"), ("policy", "show")]
    for verb in ((), ("serve",), ("ledger",), ("demo",), ("lint",), *several):
        done = subprocess.run([sys.executable, "-m", "kvsteward", *verb, "--help"], capture_output=True, text=True)
        assert done.returncode == 0
        assert "Usage" in done.stdout


def test_importing_the_package_loads_little():
    code = "import sys, kvsteward.cli; print([m for m in ('aiohttp','starlette','torch','plotly') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
