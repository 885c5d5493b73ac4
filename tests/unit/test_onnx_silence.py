"""ONNX Runtime keeps to itself what it runs."""

import os
import subprocess
import sys
from pathlib import Path

QUIET = ("CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS")
"""What would keep it silent without our doing."""


def test_the_runtime_does_not_report_to_its_maker(models: Path, tmp_path: Path) -> None:
    """Its official builds do so by default, and leave the file of a session when they begin."""
    model = models / "double" / "1" / "model.onnx"
    code = (
        "import sys; from pathlib import Path; from npufleet_worker.backends import open_backend;"
        "open_backend(Path(sys.argv[1])).close()"
    )
    environ = {k: v for k, v in os.environ.items() if k not in QUIET} | {"TMPDIR": str(tmp_path)}

    subprocess.run([sys.executable, "-c", code, str(model)], env=environ, check=True, timeout=60)

    assert list(tmp_path.iterdir()) == []
