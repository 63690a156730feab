"""What the page says is left out is refused, so that no client takes it for served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trencadis.server.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "server" / "api.md").read_text()
TABLE = PAGE.partition("## What is left out")[2].partition("\n## ")[0]
NAMES = [
    name
    for row in re.findall(r"^\| (`.*?) \|", TABLE, re.MULTILINE)
    for name in re.findall(r"`(.*?)`", row)
]


def test_the_table_has_fields_routes_and_flags():
    assert len(NAMES) > 20
    assert {name[0] for name in NAMES} >= {"/", "-"}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in NAMES if name[0] not in "/-"])
async def test_a_field_is_refused_by_its_name(client, engine, name):
    prompts = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"prompt": "a"},
    }
    for path, prompt in prompts.items():
        response = await client.post(path, json={**prompt, name: {"a": 1}})
        assert response.status_code == 400, path
        assert response.json()["error"]["param"] == name
    assert not engine.requests


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in NAMES if name[0] == "/"])
async def test_there_is_no_such_route(client, name):
    assert (await client.post(name, json={})).status_code in (404, 405)


@pytest.mark.parametrize("name", [name for name in NAMES if name[0] == "-"])
def test_there_is_no_such_flag(name, capsys):
    with pytest.raises(SystemExit):
        main([name])
    assert name in capsys.readouterr().err
