"""One of several gateway processes on a port, as `npufleet gateway --processes N` starts them."""

import sys

from npufleet import logs, settings
from npufleet.errors import NpufleetError
from npufleet_gateway import process

if __name__ == "__main__":
    found = settings.load()
    logs.setup(found.log_level, found.log_format)
    try:
        process.run(found, reuse_port=True)
    except NpufleetError as error:
        sys.exit(f"error: {error}")
