"""Which servers there are: script, wires, path. Knows nothing of how one is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One server. The first of its `wires` is its usual one; `json` the one of its JSON.

    `requirements` names a file of pinned packages; None: the environment that the bench runs in.
    """

    name: str
    script: str
    wires: tuple[str, ...]
    json: str = "oip"
    path: str = "/infer"
    requirements: str | None
    environ: Mapping[str, str] = field(default_factory=dict)


OURS = "npufleet"

_OIP = "/v2/models/model/infer"

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name=OURS,
            script="npufleet_server.py",
            wires=("raw", "json"),
            json="json",
            path="/v1/models/model/infer",
            requirements=None,
        ),
        Peer(name="echo", script="echo_server.py", wires=("raw",), json="raw", requirements=None),
        Peer(
            name="fastapi",
            script="fastapi_server.py",
            wires=("raw", "oip"),
            requirements="fastapi",
        ),
        Peer(
            name="mosec",
            script="mosec_server.py",
            wires=("raw", "oip"),
            path="/inference",
            requirements="mosec",
        ),
        Peer(
            name="litserve",
            script="litserve_server.py",
            wires=("raw", "oip"),
            requirements="litserve",
        ),
        Peer(
            name="mlserver",
            script="mlserver_server.py",
            wires=("oip", "oipb64"),
            path=_OIP,
            requirements="mlserver",
        ),
        Peer(
            name="bentoml",
            script="bentoml_server.py",
            wires=("nested", "raw"),
            json="nested",
            requirements="bentoml",
        ),
        Peer(name="ray", script="ray_server.py", wires=("raw", "oip"), requirements="ray"),
        Peer(
            name="pytriton",
            script="pytriton_server.py",
            wires=("oipbin", "oip"),
            path=_OIP,
            requirements="pytriton",
        ),
    )
}
