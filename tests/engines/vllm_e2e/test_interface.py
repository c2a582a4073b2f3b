"""akv's connector beside the classes of the vLLM that is installed: what vLLM calls is there, and takes what vLLM gives.

vLLM calls some hooks of a connector in rare cases alone, and a hook of another name or signature would be none.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

#: Importing vLLM may compile thousands of files: more than other tests are given.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def connector() -> Any:
    from akv.engines.vllm import AkvConnector

    return AkvConnector


def arguments(function: Any) -> list[tuple[str, inspect.Parameter]]:
    return [(name, one.replace(annotation=one.empty)) for name, one in inspect.signature(function).parameters.items()]


def test_every_hook_is_one_of_vllms_and_takes_its_arguments(connector: Any) -> None:
    bases = [base for base in connector.__mro__[1:] if base.__module__.startswith("vllm.")]
    hooks = {
        name: hook for name, hook in vars(connector).items() if not name.startswith("_") and not isinstance(hook, property)
    }
    assert len(hooks) > 20
    for name, hook in hooks.items():
        theirs = next((vars(base)[name] for base in bases if name in vars(base)), None)
        assert theirs is not None, f"vLLM knows no {name}"
        assert arguments(getattr(hook, "__func__", hook)) == arguments(getattr(theirs, "__func__", theirs)), name
    assert not inspect.isabstract(connector)


def test_both_forms_of_what_ended_say_the_same(connector: Any) -> None:
    from akv.engines.vllm.ends import Results

    class Ended:
        def results(self, *, idle: bool) -> Results:
            return Results({"sent"}, {"received", "failed"}, {"failed"}, set())

    one = connector.__new__(connector)
    one._worker, one._connector_metadata = Ended(), None
    assert one.get_finished(set()) == ({"sent"}, {"received", "failed"})
    newer = one.get_transfer_results(set())
    assert (newer.finished_sending, newer.finished_recving) == one.get_finished(set())
    assert newer.failed_recving == {"failed"}


def test_K4_what_vllm_makes_of_a_models_revision_names_its_commit() -> None:
    from huggingface_hub.hf_api import ResolvedRevision

    from akv.engines.vllm.configuration import _model_key

    revision = ResolvedRevision(resolved="0123456789abcdef0123456789abcdef01234567", initial="main", repo_id="maker/model")
    assert _model_key(SimpleNamespace(model="maker/model", revision=revision)) == f"maker/model@{revision.resolved}"
