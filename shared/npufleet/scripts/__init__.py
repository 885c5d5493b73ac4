"""The Lua scripts of the wire, as the server knows them: by the digest of their text.

What each takes and answers stands at the top of its file. Knows nothing of connections.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text for SCRIPT LOAD, its SHA-1 for EVALSHA."""

    name: str
    text: bytes
    sha: str


def _load(name: str) -> Script:
    text = files(__name__).joinpath(f"{name}.lua").read_bytes()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


BEAT = _load("beat")
CANCEL = _load("cancel")
CLAIM = _load("claim")
FINISH = _load("finish")
GIVE_BACK = _load("give_back")
REAP = _load("reap")
RENEW = _load("renew")
SUBMIT = _load("submit")
TAKE = _load("take")
