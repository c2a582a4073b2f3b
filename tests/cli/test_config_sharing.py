"""`akv config check A B`: why two servers share pages or not; and the key of a page, part by part."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from akv.cli.config import sharing
from akv.cli.config.command import add_config
from akv.plan.identity import Hashing
from akv.plan.keys import KeySpace
from akv.settings import check_settings
from akv.values.scope import EMPTY_SCOPE
from akv_testing import tiny_layout

POOL = {"master_address": "10.0.0.1:50051"}
BASE: dict[str, Any] = {"model_key": "org/m", "store": POOL}


def compared(one: dict[str, Any], other: dict[str, Any]) -> sharing.Comparison:
    return sharing.compare(check_settings(BASE | one), check_settings(BASE | other))


def key_of(settings: dict[str, Any]) -> str:
    checked = check_settings(BASE | settings)
    chain = Hashing(4, 0, checked.key_format, checked.key_secret.encode()).chain(EMPTY_SCOPE, range(4))
    return KeySpace.of_settings(checked, tiny_layout()).keys(0, chain.hashes(0, 1))[0]


MAC = {"integrity": "mac", "integrity_secret": "s"}


@pytest.mark.parametrize(
    ("one", "other", "fields"),
    [
        ({}, {}, []),
        ({"namespace": "a"}, {}, ["namespace"]),
        ({"model_key": "other"}, {}, ["model_key"]),
        ({"revision": "1"}, {}, ["revision"]),
        ({"revision": "1"}, {"revision": "2", "key_secret": "k"}, ["revision", "key_secret"]),
        ({"pin_model_key": True}, {}, ["pin_model_key"]),
        ({"pin_model_key": True}, {"pin_model_key": True}, []),
        ({"key_secret": "hunter2"}, {}, ["key_secret"]),
        ({"key_secret": "hunter2"}, {"key_secret": "hunter3"}, ["key_secret"]),
        ({"key_secret": "hunter2"}, {"key_secret": "hunter2"}, []),
        (MAC, {}, ["integrity"]),
        (MAC, {"integrity": "mac", "integrity_secret": "hunter2"}, ["integrity"]),
        (MAC, {"integrity": "checksum"}, ["integrity"]),
        (MAC, MAC, []),
        ({"store": {"master_address": "10.0.0.2:50051"}}, {}, ["store.master_address"]),
        ({"pool": "embedded", "store": {}}, {}, ["pool"]),
        ({"role": "producer"}, {"role": "producer"}, ["role"]),
        ({"role": "consumer"}, {"role": "consumer"}, ["role"]),
        ({"role": "producer"}, {"role": "consumer"}, []),
        ({"role": "producer"}, {}, []),
        ({"loaders": 3, "require_salt": True}, {}, []),
    ],
)
def test_the_reasons_name_the_settings_that_differ(one: dict[str, Any], other: dict[str, Any], fields: list[str]) -> None:
    for left, right in ((one, other), (other, one)):
        comparison = compared(left, right)
        assert [reason.partition(":")[0] for reason in comparison.reasons] == fields
        assert comparison.share is (not fields)
        assert "hunter" not in str(comparison)


def test_what_is_shared_in_part_is_a_condition() -> None:
    trtllm = {"key_format": "trtllm", "pin_model_key": True, "model_key": "m"}
    told = compared(trtllm, {"pin_model_key": True, "model_key": "m", "role": "consumer", "require_salt": True})
    assert told.share
    said = " ".join(told.conditions)
    assert "key_format: prompts with media are not shared" in said
    assert "require_salt: requests without a salt are neither read nor saved by B" in said
    assert "role: B only reads what A saves" in said
    assert "nothing compares them" in said


@pytest.mark.parametrize(
    ("one", "other", "conditions"),
    [
        ({}, {}, {"store.local_hostname"}),
        ({"local_hostname": "10.0.0.2"}, {"local_hostname": "10.0.0.3"}, set()),
        ({"local_hostname": "10.0.0.2"}, {"segment_bytes": 0}, set()),
        ({"local_hostname": "10.0.0.2"}, {"local_hostname": "LocalHost"}, {"store.local_hostname"}),
        ({"segment_bytes": 0}, {"segment_bytes": 0}, {"store.segment_bytes"}),
        ({"segment_bytes": 0}, {"segment_bytes": 0, "protocol": "rdma"}, {"store.segment_bytes", "store.protocol"}),
        (
            {"segment_bytes": 0},
            {"local_hostname": "10.0.0.3", "metadata_server": "http://10.0.0.1:8080/metadata"},
            {"store.metadata_server"},
        ),
        ({"master_address": "127.0.0.1:1"}, {"master_address": "LOCALHOST:1"}, {"store.master_address"}),
        ({"master_address": "127.0.1.1:1"}, {"master_address": "127.0.1.1:1"}, {"store.master_address"}),
        ({"master_address": "[::1]:1"}, {"master_address": "::1:1"}, {"store.master_address"}),
    ],
)
def test_where_pages_are_out_of_reach_is_a_condition(one: dict[str, Any], other: dict[str, Any], conditions: set[str]) -> None:
    for left, right in ((one, other), (other, one)):
        told = compared({"store": POOL | left}, {"store": POOL | right})
        assert told.share
        assert {told for told, colon, _ in (line.partition(":") for line in told.conditions) if "store." in told} == conditions


def test_a_port_is_part_of_an_address_however_a_machine_calls_itself() -> None:
    told = compared({"store": {"master_address": "localhost:1"}}, {"store": {"master_address": "127.0.0.1:2"}})
    assert [reason.partition(":")[0] for reason in told.reasons] == ["store.master_address"]


def test_K2_two_drafters_are_told_apart_by_nobody_but_the_operator() -> None:
    assert any("model_key" in line and "weights" in line for line in compared({}, {}).conditions)


def test_K4_the_verdict_is_that_of_the_keys() -> None:
    rng = random.Random(4)
    choices: dict[str, list[Any]] = {
        "namespace": ["akv1", "a b"],
        "model_key": ["org/m", "m"],
        "revision": ["", "1"],
        "pin_model_key": [False, True],
        "key_secret": ["", "k", "l"],
    }
    integrity: list[dict[str, Any]] = [{}, {"integrity": "checksum"}, MAC, {"integrity": "mac", "integrity_secret": "t"}]
    shared = 0
    for _ in range(500):
        one = {name: rng.choice(values) for name, values in choices.items()} | rng.choice(integrity)
        other = dict(one)
        for name in rng.sample(list(choices), rng.choice([0, 1, 2])):
            other[name] = rng.choice(choices[name])
        comparison = compared(one, other)
        assert comparison.share is (key_of(one) == key_of(other)), (one, other)
        shared += comparison.share
    assert 100 < shared < 400


@pytest.mark.parametrize(
    "settings",
    [{}, MAC, {"revision": "r/1", "pin_model_key": True}, {"key_format": "trtllm", "pin_model_key": True, "model_key": "m"}],
)
def test_K3_the_parts_explained_make_up_the_key(settings: dict[str, Any]) -> None:
    parts = sharing.key_parts(check_settings(BASE | settings))
    pattern = "".join(re.escape(part.spelt) for part in parts)
    for unknown in ("<layout>", "<hash>", "<group>", "<tokens>", "<bytes>", "<shard>"):
        pattern = pattern.replace(re.escape(unknown), r"[0-9a-z]+")
    assert re.fullmatch(pattern, key_of(settings))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name in ("AKV_CONFIG", "MOONCAKE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    add_config(app)
    for name, text in (("a", ""), ("b", ""), ("c", 'revision = "2"\nkey_secret = "hunter2"\n')):
        rest = '[store]\nmaster_address = "10.0.0.1:50051"\n'
        (tmp_path / f"{name}.toml").write_text(f'model_key = "m"\n{text}{rest}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return lambda *options: CliRunner().invoke(app, ["config", *options])


def test_check_of_two_files_says_why_and_exits_by_the_verdict(run: Any) -> None:
    done = run("check", "a.toml", "b.toml")
    assert (done.exit_code, done.output.splitlines()[0]) == (0, "A and B share pages, if:")
    done = run("check", "a.toml", "c.toml")
    assert done.exit_code == 1
    assert "revision: keys of A have nothing where those of B have @2" in done.output
    assert "key_secret: B has one, A has none" in done.output
    told = json.loads(run("check", "a.toml", "c.toml", "--json").stdout)
    assert (told["share"], len(told["reasons"])) == (False, 2)
    assert json.loads(run("check", "a.toml", "b.toml", "--json").stdout)["share"] is True


def test_explain_shows_the_key_part_by_part_and_no_secret(run: Any) -> None:
    told = json.loads(run("explain", "c.toml", "--json").stdout)["key_space"]
    assert told["key"] == "".join(part["spelt"] for part in told["parts"])
    assert told["key"] == "akv1/m~<layout>@2/<shard>/lg<group>/t<tokens>b<bytes>/<hash>"
    text = run("explain", "c.toml").output
    for part in told["parts"]:
        assert part["name"] in text
    assert "keyed" in text
    assert "hunter2" not in text + str(told)
