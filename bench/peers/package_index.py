"""Fetches one source distribution from the package index that pip is configured with.

`pip download` would first build what the distribution needs to tell its metadata (here: cmake, from source);
this takes the file alone. Index pages, extra indexes, link folders and certificate are pip's own settings.
"""

from __future__ import annotations

import ast
import hashlib
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from libs.wire.errors import BatonError

_DEFAULT_INDEX = "https://pypi.org/simple"
_TIMEOUT_S = 60.0
_SECTIONS = ("global", "download", "install", ":env:")  # the last one wins


def fetch(project: str, file_name: str, sha256: str, folder: Path) -> Path:
    """The file in `folder`, fetched if it is not there. Raises BatonError where none has these bytes."""
    target = folder / file_name
    if target.is_file():
        check_sha256(target, sha256)
        return target
    folder.mkdir(parents=True, exist_ok=True)
    settings = parse_pip_config(_pip_config())
    context = ssl.create_default_context(cafile=settings.get("cert"))
    for url in _candidates(settings, project, file_name, context):
        partial = target.with_suffix(".partial")
        partial.write_bytes(_read(url, context))
        check_sha256(partial, sha256)
        return partial.rename(target)
    raise BatonError(f"no package index that pip knows has {file_name}")


def check_sha256(path: Path, expected: str) -> None:
    """Raises BatonError where the file is another one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise BatonError(f"{path} has sha256 {actual}, not {expected}")


def parse_pip_config(text: str) -> dict[str, str]:
    """Values by name from `pip config list`: lines `section.name='value'`."""
    values: dict[str, str] = {}
    for section in _SECTIONS:
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                values[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return values


def index_pages(settings: Mapping[str, str], project: str) -> list[str]:
    """URLs of the project's page on each index, in pip's order."""
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return []
    indexes = [settings.get("index-url", _DEFAULT_INDEX), *settings.get("extra-index-url", "").split()]
    name = re.sub(r"[-_.]+", "-", project).lower()
    pages = [f"{index.rstrip('/')}/{name}/" for index in indexes]
    return [f"{page}index.html" if page.startswith("file:") else page for page in pages]


def links_to(page_url: str, html: str, file_name: str) -> list[str]:
    """Absolute URLs on an index page whose file has this name; without hashes in the fragment."""
    parser = _Anchors()
    parser.feed(html)
    urls = [urljoin(page_url, href).partition("#")[0] for href in parser.hrefs]
    return [url for url in urls if unquote(urlsplit(url).path).rpartition("/")[2] == file_name]


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: Iterable[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.hrefs += [value for name, value in attrs if name == "href" and value]


def _candidates(
    settings: Mapping[str, str], project: str, file_name: str, context: ssl.SSLContext
) -> Iterator[str]:
    for place in settings.get("find-links", "").split():
        path = Path(place.removeprefix("file://")) / file_name
        if path.is_file():
            yield path.as_uri()
    for page in index_pages(settings, project):
        try:
            html = _read(page, context).decode("utf-8", "replace")
        except BatonError:
            continue  # not every index has every project; having it nowhere is the error
        yield from links_to(page, html, file_name)


def _read(url: str, context: ssl.SSLContext) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=context) as response:
            return bytes(response.read())
    except (OSError, urllib.error.URLError) as error:
        raise BatonError(f"{url} cannot be read: {error}") from error


def _pip_config() -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return done.stdout
