"""Servers that are refused, by name; what the classes declare; how the halves find each other; no engine is imported early."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import akv.engines.tensorrt_llm as adapter
from akv import NotOpenError, SettingsError
from akv.engines.tensorrt_llm.arguments import capabilities_of
from akv.engines.tensorrt_llm.metadata import PassMetadata
from akv.errors import DependencyError, EngineContractError
from akv.settings import check_settings
from akv_testing import FakeStore
from akv_testing.engines.tensorrt_llm import (
    ConnectorScheduler,
    ConnectorWorker,
    GroupShape,
    Refused,
    StandInCache,
    StandInRequest,
    StandInServer,
    llm_args,
)
from akv_testing.engines.tensorrt_llm.contract import check_classes

Serve = Callable[..., StandInServer]
BASES = adapter.Bases(ConnectorScheduler, ConnectorWorker)


def settings(**fields: Any) -> Any:
    return check_settings({"model_key": "m", "pool": "embedded"} | fields)


def spec(kind: str, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(decoding_type=kind, **fields)


@pytest.mark.parametrize(
    ("config", "drafter", "lookahead"),
    [
        (None, "none", 0),
        (spec("MTP", num_nextn_predict_layers=3), "mtp", 1),
        (spec("MTP", num_nextn_predict_layers=3, use_mtp_vanilla=True), "vanilla_mtp", 3),
        (spec("MTP", num_nextn_predict_layers=None, max_draft_len=2, use_mtp_vanilla=True), "vanilla_mtp", 2),
        (spec("Eagle3", max_draft_len=4), "eagle3", 1),
        (spec("Eagle", max_draft_len=4, eagle3_one_model=True), "eagle3", 1),
        (spec("Medusa", max_draft_len=4), "hidden_state", 0),
    ],
)
def test_P1_a_drafter_is_told_by_what_its_KV_depends_on(config: Any, drafter: str, lookahead: int) -> None:
    declared = capabilities_of(llm_args(speculative_config=config), settings())
    assert (declared.drafter, declared.lookahead) == (drafter, lookahead)


@pytest.mark.parametrize(
    "config",
    [
        spec("MTP", mtp_eagle_one_model=False),
        spec("Eagle3", eagle3_one_model=False),
        spec("NGram"),
        spec("Draft_Target"),
        SimpleNamespace(),
    ],
)
def test_P1_any_other_drafter_is_refused_by_name(config: Any) -> None:
    kind = getattr(config, "decoding_type", "SimpleNamespace")
    with pytest.raises(SettingsError, match=f"llm_args.speculative_config' is '{kind}'"):
        capabilities_of(llm_args(speculative_config=config), settings())


def test_P1_vanilla_MTP_whose_draft_length_is_not_resolved_is_refused(serve: Serve) -> None:
    with pytest.raises(SettingsError, match="draft_tokens"):
        serve(args=llm_args(speculative_config=spec("MTP", use_mtp_vanilla=True)))


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"])
def test_more_ranks_than_one_are_refused_by_name(name: str) -> None:
    classes = adapter.connector_classes(settings(), bases=BASES)
    for half in classes:
        with pytest.raises(SettingsError, match=f"llm_args.{name}' is 2"):
            half(llm_args(**{name: 2}))


def test_S9_an_owner_that_decodes_beside_others_does_not_save() -> None:
    owner = {"enable_attention_dp": True, "tensor_parallel_size": 4}
    with pytest.raises(SettingsError, match="enable_attention_dp"):
        capabilities_of(llm_args(**owner), settings())
    capabilities_of(llm_args(**owner), settings(role="consumer"))
    capabilities_of(llm_args(**owner, cache_transceiver_config=SimpleNamespace()), settings())


def test_K3_owners_and_a_server_of_one_rank_share_their_pages(serve: Serve, store: FakeStore) -> None:
    owner = llm_args(enable_attention_dp=True, tensor_parallel_size=2, cache_transceiver_config=SimpleNamespace())
    first = serve(args=owner)
    first.engine.serve(StandInRequest(1, list(range(100))))
    stored = store.keys()
    assert len(stored) == 3
    assert all("/w1r0/" in key for key in stored)
    other = serve()
    other.engine.serve(StandInRequest(1, list(range(100))))
    assert other.engine.answers == [(1, 96, 96)]
    assert other.left_behind() == []


@pytest.mark.parametrize(
    ("chosen", "aligned", "drops"),
    [
        ({}, True, True),
        ({"local_reuse_backoff": "align"}, True, False),
        ({"role": "consumer"}, True, True),
        ({"role": "producer"}, False, False),
        ({"role": "producer", "local_reuse_backoff": "align"}, False, False),
    ],
)
def test_P2_the_classes_declare_what_the_settings_say(chosen: dict[str, str], aligned: bool, drops: bool) -> None:
    for reserves in (False, True):
        scheduler, worker = adapter.connector_classes(settings(**chosen), reserves=reserves, bases=BASES)
        assert scheduler.requires_block_aligned_reuse is aligned
        assert scheduler.drops_reuse_match_backoff is drops
        assert scheduler.supports_admission_query is aligned
        assert (scheduler.reports_failed_loads, worker.reports_failed_loads) == (not reserves, not reserves)
        assert scheduler.supports_attention_dp is worker.supports_attention_dp is True
        assert scheduler.supports_speculative_prefill is True
        assert scheduler.requires_completion_reservation is False


def test_the_stand_in_refuses_classes_that_declare_nothing() -> None:
    class Scheduler(ConnectorScheduler):
        supports_attention_dp = 1  # type: ignore[assignment]  # what is not exactly True is not declared

    silent = SimpleNamespace(scheduler=Scheduler, worker=ConnectorWorker)
    cache = StandInCache([GroupShape()], tokens_per_block=32, pages=4)
    for args, early, why in (
        (llm_args(enable_attention_dp=True), False, "attention data"),
        (llm_args(speculative_config=spec("MTP")), False, "a drafter"),
        (llm_args(), True, "a query at admission"),
    ):
        with pytest.raises(Refused, match=why):
            check_classes(silent, args, cache, asks_early=early)
    Scheduler.reserve_prefix = lambda *_: (0, False)  # type: ignore[method-assign]
    with pytest.raises(Refused, match="all three"):
        check_classes(silent, llm_args(), cache, asks_early=False)


def test_halves_that_are_made_at_the_same_time_find_each_other() -> None:
    classes = adapter.connector_classes(settings(), bases=BASES)
    with ThreadPoolExecutor(2) as threads:
        servers = [
            [half.result() for half in (threads.submit(classes.worker, args), threads.submit(classes.scheduler, args))]
            for args in (llm_args(), llm_args())
        ]
    for worker, scheduler in servers:
        assert worker.session is scheduler.session
    assert servers[0][0].session is not servers[1][0].session
    alone, stranger = classes.worker(llm_args()), classes.scheduler(llm_args())
    assert alone.session is not stranger.session
    again = classes.scheduler(servers[0][0].session.llm_args)
    assert again.session is not servers[0][0].session
    again.shutdown()
    assert classes.worker(again.session.llm_args).session is not again.session


def test_a_hook_before_the_cache_was_described_says_so() -> None:
    classes = adapter.connector_classes(settings(), bases=BASES)
    scheduler = classes.scheduler(llm_args())
    with pytest.raises(NotOpenError, match="register_kv_cache_layout"):
        scheduler.get_num_new_matched_tokens(StandInRequest(1, [1, 2, 3]), 0)
    with pytest.raises(NotOpenError, match="register_kv_cache_layout"):
        scheduler.update_state_after_alloc(StandInRequest(1, [1, 2, 3]), [0])
    worker = classes.worker(scheduler.session.llm_args)
    with pytest.raises(SettingsError, match="use_kv_cache_manager_v2"):
        worker.register_kv_caches(SimpleNamespace(shape=(4, 2, 2, 64)))


def test_a_cache_in_place_of_another_is_served_anew(serve: Serve) -> None:
    server = serve()
    server.engine.serve(StandInRequest(1, list(range(100))))
    before = server.session.bridge
    server.engine.worker.register_kv_cache_layout(server.cache.layout())
    assert server.session.bridge is not before
    assert before.broken
    server.engine.serve(StandInRequest(2, list(range(100))))
    assert server.engine.answers[-1] == (2, 96, 96)
    assert server.left_behind() == []


def test_metadata_of_another_installation_is_refused(serve: Serve) -> None:
    worker = serve().engine.worker
    with pytest.raises(EngineContractError, match="version 2"):
        worker.bind_connector_meta(PassMetadata(number=1, version=2))
    worker.bind_connector_meta(None)
    worker.wait_for_save(None)


def engine_module(**attributes: Any) -> ModuleType:
    module = ModuleType("tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector")
    vars(module).update(attributes)
    return module


def test_the_classes_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DependencyError, match="connector interface cannot be imported"):
        adapter.engine_bases()
    found = engine_module(KvCacheConnectorScheduler=ConnectorScheduler, KvCacheConnectorWorker=ConnectorWorker)
    monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.setenv("AKV_MODEL_KEY", "named-by-the-environment")
    monkeypatch.setenv("AKV_POOL", "embedded")
    monkeypatch.setattr(adapter, "_of_this_process", adapter._of_this_process.__wrapped__)
    assert issubclass(adapter.AkvScheduler, ConnectorScheduler)
    assert adapter.AkvReservingScheduler.sessions.settings.model_key == "named-by-the-environment"
    assert adapter.AkvReservingWorker.reports_failed_loads is False
    assert adapter.AkvWorker.__name__ == "AkvWorker"
    with pytest.raises(AttributeError, match="AkvOther"):
        adapter.AkvOther  # noqa: B018
    old = engine_module(KvCacheConnectorScheduler=ConnectorScheduler, KvCacheConnectorWorker=object)
    monkeypatch.setitem(sys.modules, old.__name__, old)
    with pytest.raises(DependencyError, match="register_kv_cache_layout"):
        adapter.engine_bases()


def test_importing_the_adapter_imports_no_engine_and_no_torch() -> None:
    program = "import sys, akv.engines.tensorrt_llm; print({'tensorrt_llm', 'torch', 'mooncake', 'trio'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("set()", "")
