"""Every SGLang symbol that this package touches, with the signature it relies on.

A symbol counts when this package replaces it, subclasses it or calls it; the list is
`upstream_symbols.json`, dotted name -> parameter names in order, ``*`` and ``**``
before the collecting ones. `check` compares it with what is installed; it starts
nothing.
"""

import importlib.metadata
import importlib.resources
import inspect
import json
import pkgutil
from collections.abc import Callable
from typing import Any

SUPPORTED_VERSION = "0.5.23"
_SYMBOLS_FILE = "upstream_symbols.json"


def expected_symbols() -> dict[str, str]:
    """Return dotted name -> parameter names, separated by blanks."""
    file = importlib.resources.files(__package__) / _SYMBOLS_FILE
    symbols: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return symbols


def installed_version() -> str | None:
    """Return the version of SGLang that is installed, None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check(symbols: dict[str, str] | None = None) -> list[str]:
    """Return one line per symbol that is missing or has another signature.

    symbols defaults to what this package uses; an empty result means that it fits.
    """
    version = installed_version()
    if version is None:
        return ["sglang is not installed"]
    found = []
    for name, wanted in (expected_symbols() if symbols is None else symbols).items():
        try:
            symbol = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            found.append(f"{name} is not in sglang {version} ({error})")
            continue
        actual = parameter_names(symbol)
        if actual != wanted:
            found.append(f"{name} takes ({actual}) in sglang {version}, not ({wanted})")
    return found


def parameter_names(symbol: Callable[..., Any]) -> str:
    """Return a callable's parameter names, separated by blanks.

    Looks through SGLang's own hook wrappers, so that it may be asked at any time.
    """
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(symbol).parameters.values()
    return " ".join(marks.get(p.kind, "") + p.name for p in parameters)
